"""The kept outcome of sweep.py over every family of transformers, and some families run again."""

import json

import pytest
from compat.transformers import sweep
from compat.transformers.models import transformers

KEPT = json.loads(sweep.RECORD.read_text())
CAUSAL = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "phi", "phi3",
]  # fmt: skip
SHRUNK = {
    "causal": CAUSAL,
    "masked": ["bert", "modernbert", "roberta"],
    "encoder-decoder": ["t5", "bart"],
    "speech": ["whisper"],
    "image": ["vit"],
}
"""Families that must be among those compared."""
AGAIN = [("causal", "qwen2"), ("causal", "gemma4_text"), ("masked", "roberta"), ("image", "vit")]


def test_no_family_is_wrong_and_every_refusal_has_a_reason():
    for kind, rows in KEPT["families"].items():
        for family, outcome in rows.items():
            head, _, reason = outcome.partition(": ")
            assert head in ("equal", "own attention", "refused", "not shrunk"), (kind, family, outcome)
            assert bool(reason) == (head in ("refused", "not shrunk")), (kind, family, outcome)


def test_nearly_all_causal_families_that_ask_for_attention_are_equal():
    counts = KEPT["counts"]["causal"]
    assert counts["equal"] >= 115
    assert counts["refused"] <= 3
    masked = KEPT["counts"]["masked"]
    assert masked["equal"] >= 23
    assert "refused" not in masked


def test_the_page_shows_what_was_kept():
    assert sweep.PAGE.read_text() == sweep.write_page(KEPT)


@pytest.mark.parametrize("kind", SHRUNK)
def test_the_families_that_people_run_are_among_them(kind):
    assert {family: KEPT["families"][kind][family] for family in SHRUNK[kind]} == dict.fromkeys(SHRUNK[kind], "equal")


@pytest.mark.parametrize(("kind", "family"), AGAIN)
def test_a_family_comes_out_as_kept(kind, family):
    make = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    auto = getattr(transformers, sweep.KINDS[kind][1])
    assert sweep.outcome(auto, make, kind) == KEPT["families"][kind][family]
