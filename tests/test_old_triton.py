"""A Triton below 3.6 compiles no kernel: the GPU back ends refuse it by its version, before they are imported."""

import sys
import textwrap
from types import SimpleNamespace

import preloaded
import pytest

from tilewise.call import backend

PREAMBLE = """
import sys
import torch
import triton
import tilewise as tw

triton.__version__ = "3.5.1"
q = torch.randn(1, 9, 2, 8)
"""


def run(script):
    done = preloaded.run("-c", PREAMBLE + textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_explain_names_the_version_and_what_to_install():
    told = run("""
        x = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16, device="meta")
        print(tw.explain(x, x, x, device="sm_90"))
        assert not [name for name in sys.modules if name.startswith(("tilewise.triton", "tilewise.hopper"))]
    """)
    for name in ("hopper", "triton"):
        (line,) = [line for line in told.splitlines() if line.startswith(name)]
        assert "refuses" in line
        for word in ("Triton must be 3.6", "3.5.1", "torch 2.10"):
            assert word in line, line


def test_the_cpu_runs_and_the_others_say_why_not():
    told = run("""
        from studies.accumulation import attention
        assert tw.attention(q, q, q).isfinite().all()
        for call in (lambda: tw.attention(q, q, q, backend="triton"),
                     lambda: attention(q.half(), q.half(), q.half(), backend="triton")):
            try:
                call()
            except tw.Unsupported as error:
                print(error)
    """)
    assert told.count("3.5.1") == 2, told


@pytest.mark.parametrize(
    ("version", "old"),
    [("3.5.1", True), ("2.3.1", True), ("3.6.0", False), ("3.10.0", False), ("3.7.0+git1234", False), ("4.0", False)],
)
def test_versions_are_compared_as_numbers(version, old, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    if old:
        with pytest.raises(ImportError, match=version):
            backend.check_triton()
    else:
        assert backend.check_triton() is None


def test_a_folder_of_that_name_is_no_triton(monkeypatch):
    """Python imports a folder without `__init__.py`, such as a clone's parent, as an empty package."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__path__=["/home/me/triton"]))
    with pytest.raises(ImportError, match="/home/me/triton is a folder without code; rename it"):
        backend.check_triton()
