"""install and uninstall: what they accept, and that nothing stays behind."""

import sys

import preloaded
import pytest
from compat.transformers.models import make, transformers
from test_messages import FORM, SHORT_FORM

from tilewise.compat.transformers import install, uninstall
from tilewise.compat.transformers.layer import attend


def tables():
    from transformers.masking_utils import AttentionMaskInterface

    return dict(transformers.AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)


def test_nothing_stays_behind():
    uninstall()
    before = tables()
    install()
    installed = tables()
    assert installed[0]["tilewise"] is attend
    install()
    assert tables() == installed
    install("other")
    uninstall()
    assert "other" in tables()[0]
    uninstall("other")
    assert tables() == before
    with pytest.raises(ValueError, match="tilewise"):
        make("llama").set_attn_implementation("tilewise")


@pytest.mark.parametrize(
    ("attempt", "kind", "words"),
    [
        (lambda: install("flash_tilewise"), ValueError, "flash"),
        (lambda: install("owner/tilewise"), ValueError, "/"),
        (lambda: install(""), ValueError, "''"),
        (lambda: install(None), TypeError, "None"),
        (lambda: install("sdpa"), ValueError, "transformers has"),
        (lambda: install("eager"), ValueError, "transformers has"),
        (lambda: uninstall("nobody"), ValueError, "'tilewise'"),
        (lambda: uninstall("sdpa"), ValueError, "installed"),
    ],
)
def test_a_wrong_name_gets_a_sentence_and_changes_nothing(attempt, kind, words):
    before = tables()
    with pytest.raises(kind, match=words) as caught:
        attempt()
    assert FORM.fullmatch(str(caught.value))
    assert tables() == before


def test_an_old_transformers_gets_a_sentence(monkeypatch):
    before = tables()
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda batch_size, cache_position: None)
    for attempt in (install, uninstall):
        with pytest.raises(ImportError, match="too old") as caught:
            attempt()
        assert SHORT_FORM.fullmatch(str(caught.value))
    assert tables() == before


def test_without_transformers_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match="install tilewise") as caught:
        install()
    assert SHORT_FORM.fullmatch(str(caught.value))


def test_importing_tilewise_imports_no_client():
    told = "import sys, tilewise, tilewise.compat.transformers; print('transformers' in sys.modules)"
    done = preloaded.run("-c", told)
    assert done.stdout.strip() == "False"
