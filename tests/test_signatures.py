"""What an editor and help() know of the functions: every option, its type, and what comes back."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise as tw
from tilewise.attention.api import attention
from tilewise.call.options import Everything

SOURCE = Path(tw.__file__).parents[1]
OPTIONS = [name for name, p in inspect.signature(attention).parameters.items() if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize(
    ("function", "own"),
    [(tw.attention, ["q", "k", "v"]), (tw.attention_qkvpacked, ["qkv"]), (tw.explain, ["q", "k", "v", "device"])],
)
def test_every_option_is_in_the_signature(function, own):
    parameters = inspect.signature(function).parameters
    assert list(parameters) == own + OPTIONS
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


def test_the_backward_has_the_options_but_return_lse():
    parameters = list(inspect.signature(tw.attention_backward).parameters)
    assert parameters == [
        *("do", "q", "k", "v", "o", "lse", "dlse", "delta"),
        *[name for name in OPTIONS if name != "return_lse"],
    ]


def test_the_types_for_editors_name_every_option():
    assert sorted(Everything.__annotations__) == sorted(OPTIONS)


TYPED = """
from typing import Any, assert_type
from torch import Tensor
import tilewise as tw

def check(q: Tensor, flag: bool, given: dict[str, Any]) -> None:
    assert_type(tw.attention(q, q, q), Tensor)
    assert_type(tw.attention(q, q, q, mask=tw.Causal(), score=[tw.SoftCap(2.0)]), Tensor)
    assert_type(tw.attention(q, q, q, return_lse=False), Tensor)
    assert_type(tw.attention(q, q, q, return_lse=True, scale=0.5), tuple[Tensor, Tensor])
    assert_type(tw.attention(q, q, q, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(tw.attention_qkvpacked(q, mask=tw.Padding(q)), Tensor)
    assert_type(tw.attention_qkvpacked(q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tw.attention_backward(q, q, q, q, q, q, delta=q, mask=tw.Causal()), tuple[Tensor, ...])
    assert_type(tw.explain(q, q, q, device="sm_90", sink=q, return_lse=True), tw.Explanation)
    assert_type(tw.Padding(q).to("cuda"), tw.Padding)
    tw.attention(q, q, q, **given)
    tw.attention(q, q, q, causal=True)  # wrong
    tw.attention(q, q, q, mask="causal")  # wrong
    tw.attention_qkvpacked(q, scale="1")  # wrong
    tw.explain(q, q, q, scores=tw.SoftCap(2.0))  # wrong
"""


def test_a_type_checker_finds_what_is_wrong_and_knows_what_comes_back(tmp_path):
    pytest.importorskip("pyright", reason="pyright is not installed")
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SOURCE)], "pythonVersion": "3.11"}))
    command = [sys.executable, "-m", "pyright", "--project", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, check=False, cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = sorted({d["range"]["start"]["line"] for d in found if d["severity"] == "error"})
    wrong = [index for index, line in enumerate(TYPED.splitlines()) if line.endswith("# wrong")]
    assert lines == wrong, done.stdout
