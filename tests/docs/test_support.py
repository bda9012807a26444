"""docs/use/support.md: its table is what was kept, and its numbers are what happens."""

import json
import re
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pairs
import pytest
import torch

import tilewise as tw

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "use" / "support.md").read_text()
RECORD = json.loads(pairs.RECORD.read_text())


def test_the_table_is_what_was_kept():
    found = pairs.MARKED.search(PAGE)
    assert found, "the page has lost its markers"
    assert found[0] == found[1] + pairs.table(RECORD) + found[2], "run python tests/pairs.py --table"


def test_every_pair_passed_every_topic_that_its_triton_can_have():
    assert list(RECORD) == [pair.torch for pair in pairs.PAIRS]
    for pair, row in zip(pairs.PAIRS, RECORD.values(), strict=True):
        assert (row["torch"].partition("+")[0], row["triton"]) == (pair.torch, pair.triton)
        compiles = pairs.number(pair.triton) >= pairs.number(pairs.NEEDED)
        for topic in pairs.TOPICS:
            if topic in pairs.WITH_TRITON and not compiles:
                assert row[topic] is None
            else:
                assert re.fullmatch(r"\d+ passed(, \d+ skipped)?", row[topic]), (pair, topic)
    oldest, *_, newest = RECORD.values()
    assert pairs.number(oldest["python"]) <= pairs.number(newest["python"])


def test_the_package_asks_for_what_the_table_begins_with():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={next(iter(pairs.BRINGS))}"' in text
    assert f'"triton>={pairs.NEEDED}"' in text
    assert re.findall(r"Python :: 3\.(\d+)", text) == [str(minor) for minor in pairs.MINORS]


def test_ci_runs_what_the_page_says():
    (said,) = re.findall(r"CI runs every test with Python ([\d.]+), PyTorch ([\d.]+) and Triton ([\d.]+)", PAGE)
    makefile = (ROOT / "Makefile").read_text()
    assert f"PYTHON=python{said[0]}" in (ROOT / ".ci" / "run").read_text()
    assert [f"TORCH ?= torch=={said[1]}\n" in makefile, f"TRITON ?= triton=={said[2]}\n" in makefile] == [True, True]
    assert re.search(r"TRITON_NEWEST \?= triton==(\S+)", makefile)[1] == pairs.PAIRS[-1].triton


def test_this_pytorch_brings_what_the_table_says():
    wanted = [line for line in metadata.requires("torch") or [] if line.startswith("triton")]
    if not wanted:
        pytest.skip("this PyTorch is built for CPUs, and brings no Triton")
    release = ".".join(map(str, pairs.number(torch.__version__)))
    assert re.search(rf"[=~]=\s*{re.escape(pairs.BRINGS[release])}\.", wanted[0]), wanted


def test_a_pair_without_a_python_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(pairs, "write", lambda record: None)
    monkeypatch.setattr(pairs, "RECORD", tmp_path / "pairs.json")
    assert pairs.main(["2.15.0"]) == 0
    assert "2.15.0 is not tried: none of Python 3.13, 3.12, 3.11 is here" in capsys.readouterr().out


def test_a_shim_without_a_python_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    shim, real = tmp_path / "python3.13", tmp_path / "pyenv" / "versions" / "3.13.1" / "bin" / "python3.13"
    real.parent.mkdir(parents=True)
    for path, status in ((shim, 127), (real, 0)):
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    assert pairs.interpreter(pairs.PAIRS[-1]) == str(real)


def test_memory_of_lists():
    pytest.importorskip("triton")
    spec = spec_from_file_location("offline", ROOT / "tests" / "triton" / "offline.py")
    spec.loader.exec_module(offline := module_from_spec(spec))
    q, ids = offline.meta(2, 2**18, 4, 64, dtype=torch.bfloat16), offline.meta(2, 2**18, dtype=torch.int32)
    made = [one for one in offline.launches("sm_90", q, q, q, mask=tw.Documents(ids, ids)) if "BY_KEY" in one.constants]
    assert len(made) == 3, "one list in the forward, two in the backward"
    for one in made:
        rows, columns = (2**18 // one.constants[size] for size in ("B_R", "B_C"))
        lists, listed = one.arguments[0].ptr, rows if one.constants["BY_KEY"] else columns
        assert lists.numel() * lists.itemsize == 2 * 4 * rows * columns // listed * (listed + 2)
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| memory of a list")]
    said = [float(amount) * {"k": 1e3, "M": 1e6}[unit] for amount, unit in re.findall(r"([\d.]+) (k|M)B", line)]
    assert said == [pytest.approx(4 * tiles * (tiles + 2), rel=0.01) for tiles in (2**7, 2**9, 2**11, 2**13)]


@pytest.mark.parametrize(("name", "keys"), [("full", 2048), ("causal", 512), ("window", 256)])
def test_how_far_a_nan_spreads(name, keys):
    mask = {"full": tw.Full(), "causal": tw.Causal(), "window": tw.Window(10, 0)}[name]
    q, k, v = (torch.randn(1, 2048, 1, 64, requires_grad=True) for _ in range(3))
    q.detach()[0, 50] = torch.nan
    o = tw.attention(q, k, v, mask=mask)
    dk = torch.autograd.grad(o, k, torch.randn_like(o))[0]
    assert o.isnan().any(-1).sum() == 1
    assert dk.isnan().any(-1).sum() == keys
    assert str(keys) in PAGE


def test_a_ninth_width_passes_the_limit_of_recompiling():
    assert "with nine window widths" in PAGE
    torch._dynamo.reset()
    attend = torch.compile(
        lambda x, width: tw.attention(x, x, x, mask=tw.Window(width, 0)), backend="eager", fullgraph=True
    )
    x = torch.randn(1, 16, 1, 8)
    with torch._dynamo.config.patch(recompile_limit=8):
        for width in range(8):
            attend(x, width)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            attend(x, 8)
    torch._dynamo.reset()
