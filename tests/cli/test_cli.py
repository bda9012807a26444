"""python -m tilewise: tables, JSON for programs, a sentence and exit status 2 for bad input."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import tilewise as tw
from tilewise import cli
from tilewise.cli.app import app
from tilewise.compat.shadow import PACKAGES


def call(*arguments):
    return CliRunner().invoke(app, arguments, prog_name="tilewise")


def sentence(result):
    """What a person reads, without the frame round it."""
    return " ".join(result.output.replace("│", " ").split())


def test_info_names_every_back_end_and_why_it_cannot_run():
    found = json.loads(call("info", "--json").stdout)
    assert found["versions"]["tilewise"] == tw.__version__
    assert found["backends"]["cpu"]["cpu"] == []
    assert set(found["backends"]) == {"triton", "cpu"} or "triton" in found["backends"]
    assert all(isinstance(reasons, list) for by in found["backends"].values() for reasons in by.values())
    assert found["default"]["backend"] in found["backends"]
    assert set(found["shadows"]) == set(PACKAGES)
    assert tw.__version__ in call("info").stdout


def test_explain_answers_for_a_card_that_is_not_here():
    options = "--q 2,1024,16,64 --kv-heads 4 --mask causal --window 1023,0 --dtype bf16 --softcap 50 --dropout 0.1"
    plan = json.loads(call("explain", *options.split(), "--device", "sm_90", "--json").stdout)
    assert plan["backend"] == "hopper"
    assert plan["tiles"]
    assert "sm_90" in plan["refusals"]["cpu"][0]
    text = call("explain", *options.split(), "--device", "sm_75").stdout
    assert "no bf16" in text


@pytest.mark.parametrize(
    "options",
    [
        "--mask causal --mask padding --varlen",
        "--mask prefix --alibi --sink",
        "--mask documents --bias 1,16,1024,1024",
        "--mask dense --keys 512 --q 2,512,16,64 --v-size 128",
        "--window 128,- --dtype fp32 --precision bf16x6 --deterministic --scale 0.1",
        "--dtype fp64 --device cpu --backend cpu",
    ],
)
def test_explain_knows_every_option(options):
    result = call("explain", "--device", "sm_90", *options.split(), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["backend"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("explain --q 2,1024", "q must be 4 whole numbers"),
        ("explain --q a,b,c,d", "got 'a,b,c,d'"),
        ("explain --kv-heads 3", "multiple"),
        ("explain --dtype int8", "dtype must be one of"),
        ("explain --mask diagonal", "mask must be one of"),
        ("explain --window 5", "left,right"),
        ("explain --softcap -1", "cap"),
        ("explain --dropout 1.5", "[0, 1)"),
        ("explain --q 1,8,1,600", "512"),
        ("explain --backend magic", "backend must be"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, says):
    result = call(*arguments.split())
    assert result.exit_code == 2
    assert says in sentence(result)
    assert "Traceback" not in result.output


def test_shadow_writes_wheels_and_names_the_command(tmp_path):
    result = call("shadow", str(tmp_path / "new"), "--force")
    assert result.stdout.split() == [str(tmp_path / "new" / "flash_attn-2.8.3-py3-none-any.whl")]
    assert f"pip install --no-deps {result.stdout.strip()}" in result.stderr
    several = [word for package in PACKAGES for word in ("--package", package)]
    assert len(call("shadow", str(tmp_path), "--force", *several).stdout.split()) == len(PACKAGES)
    result = call("shadow", str(tmp_path), "--package", "torch")
    assert result.exit_code == 2
    assert "packages must be some of flash_attn" in sentence(result)


def test_shadow_does_not_replace_the_original_unasked(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    result = call("shadow", str(tmp_path), "--package", "flash_attn_interface")
    assert result.exit_code == 2
    assert "flash_attn_interface is installed" in sentence(result)
    assert not list(tmp_path.glob("*.whl"))


def test_without_the_extra_one_sentence_says_what_to_install():
    block = "import sys; sys.modules['rich'] = None; sys.argv = ['tilewise', 'info']; import tilewise.__main__"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "The command line needs rich: pip install 'tilewise[cli]'"
    assert done.stdout == ""


def test_main_is_the_console_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tilewise", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("info", "explain", "warm", "shadow"))
    assert not any(command in shown for command in ("bench", "demo", "study", "train", "tune"))


@pytest.mark.parametrize(
    "arguments",
    ["bench --quick", "demo --out here", "study accuracy --quick", "study --help", "train --model gpt2-124m", "tune"],
)
def test_a_command_that_moved_says_where_it_is(arguments):
    result = call(*arguments.split())
    assert result.exit_code == 2
    name, *_ = arguments.split()
    assert f"`tilewise {name}` is now `python -m studies " in sentence(result)
