"""python -m tilewise: plain tables, JSON for programs, a sentence and exit status 2 for bad input; torch is enough."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import command
import pytest
from command import call

import tilewise as tw
from tilewise import cli
from tilewise.cli.calls import CALL
from tilewise.compat.shadow import PACKAGES

ROOT = Path(__file__).parents[2]


def sentence(result):
    """The one line that bad input ends with."""
    assert result.status == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise: ")
    return line


def test_info_names_every_back_end_and_why_it_cannot_run():
    found = json.loads(call("info", "--json").stdout)
    assert found["versions"]["tilewise"] == tw.__version__
    assert found["backends"]["cpu"]["cpu"] == []
    assert set(found["backends"]) == {"triton", "cpu"} or "triton" in found["backends"]
    assert all(isinstance(reasons, list) for by in found["backends"].values() for reasons in by.values())
    assert found["default"]["backend"] in found["backends"]
    assert set(found["shadows"]) == set(PACKAGES)


def test_info_is_a_plain_table():
    result = call("info")
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.isascii()
    lines = result.stdout.splitlines()
    assert f"  tilewise  {tw.__version__}" in lines
    head = lines.index("Back ends") + 1
    assert lines[head].split() == ["on", "runs"]
    for name, line in zip(json.loads(call("info", "--json").stdout)["backends"], lines[head + 1 :], strict=False):
        assert line.split()[0] == name
        assert line[lines[head].index("runs") :].startswith(("yes", "no: "))


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
        "--window -,0 --q=2,64,4,16 --kv-heads=2",
        "--dtype fp64 --device cpu --backend cpu",
    ],
)
def test_explain_knows_every_option(options):
    result = call("explain", "--device", "sm_90", *options.split(), "--json")
    assert result.status == 0, result.stderr
    assert json.loads(result.stdout)["backend"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("explain --q 2,1024", "q must be 4 whole numbers"),
        ("explain --q a,b,c,d", "got 'a,b,c,d'"),
        ("explain --q", "--q must have a value, got none; run python -m tilewise explain --help"),
        ("explain --q --", "--q must have a value, got none"),
        ("explain --kv-heads 3", "multiple"),
        ("explain --kv-heads 0", "--kv-heads must be a whole number >= 1, got '0'; run"),
        ("explain --keys -5", "--keys must be a whole number >= 0, got '-5'; run"),
        ("explain --keys many", "--keys must be a whole number >= 0, got 'many'"),
        ("explain --dtype int8", "dtype must be one of"),
        ("explain --mask diagonal", "mask must be one of"),
        ("explain --window 5", "left,right"),
        ("explain --window -5,0", "window must be"),
        ("explain --softcap -1", "cap"),
        ("explain --scale -1", "scale must be finite"),
        ("explain --dropout 1.5", "[0, 1)"),
        ("explain --dropout half", "--dropout must be a number, got 'half'"),
        ("explain --q 1,8,1,600", "576"),
        ("explain --backend magic", "backend must be"),
        ("explain --alibi=yes", "--alibi"),
        ("explain --devic cpu", "got --devic (did you mean --device?); run python -m tilewise explain --help"),
        ("explain --fast", "got --fast; run python -m tilewise explain --help"),
        ("explain causal", "got causal; run python -m tilewise explain --help"),
        ("info --q 1,8,1,16", "got --q; run python -m tilewise info --help"),
        ("shadow", "FOLDER; run python -m tilewise shadow --help"),
        ("shadow here --package", "--package must have a value"),
        ("warm --device sm_90 --processes 0", "--processes must be a whole number >= 1, got '0'"),
        ("warm --device sm_90 --also --causal", "got --causal; "),
        ("warm --device sm_90 --also -h", "got -h; run python -m tilewise warm --help"),
        ("warm --device sm_90 --also '", "also must be options of a call"),
        (
            "attend",
            "command must be one of info, explain, warm, shadow, run, got 'attend'; run python -m tilewise --help",
        ),
        ("--verbose", "got --verbose; run python -m tilewise --help"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, says):
    assert says in sentence(call(*arguments.split(" ")))


def test_a_folder_may_have_the_name_of_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("shadow", "folder", "--force").status == 0
    assert list((tmp_path / "folder").glob("*.whl"))


def test_shadow_writes_wheels_and_names_the_command(tmp_path):
    result = call("shadow", str(tmp_path / "new"), "--force")
    assert result.stdout.split() == [str(tmp_path / "new" / "flash_attn-2.8.3-py3-none-any.whl")]
    assert f"pip install --no-deps {result.stdout.strip()}" in result.stderr
    several = [word for package in PACKAGES for word in ("--package", package)]
    assert len(call("shadow", str(tmp_path), "--force", *several).stdout.split()) == len(PACKAGES)
    assert "packages must be some of flash_attn" in sentence(call("shadow", str(tmp_path), "--package", "torch"))


def test_shadow_does_not_replace_the_original_unasked(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    result = call("shadow", str(tmp_path), "--package", "flash_attn_interface")
    assert "flash_attn_interface is installed" in sentence(result)
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_describes_every_command_and_option(word, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    front = call(word)
    assert (front.status, front.stderr) == (0, "")
    assert not any(name in front.stdout for name in ("bench", "demo", "study", "train", "tune"))
    for name, (does, options) in cli.COMMANDS.items():
        assert re.search(rf"^ +{name} +{re.escape(does.__doc__)}$", front.stdout, re.MULTILINE)
        shown = call(name, word)
        assert (shown.status, shown.stderr) == (0, "")
        assert does.__doc__ in shown.stdout
        for option in options:
            called = f"{option.name if option.name.startswith('-') else ''} {option.value or ''}".strip()
            text = option.help if option.default is None else f"{option.help} [default: {option.default}]"
            assert re.search(rf"^  {called} +{re.escape(text)}$", shown.stdout, re.MULTILINE), option
    assert [option.name for option in CALL if option.default is not None] == ["--q", "--dtype", "--dropout"]


def test_no_argument_prints_the_help():
    result = call()
    assert (result.status, result.stdout, result.stderr) == (2, call("--help").stdout, "")


def test_the_version_is_one_line():
    assert call("--version") == (0, f"tilewise {tw.__version__}\n", "")


def test_main_is_the_console_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tilewise", "explain", "--device", "cpu"])
    assert cli.main() == 0
    assert "cpu       runs this" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    ["bench --quick", "demo --out here", "study accuracy --quick", "study --help", "train --model gpt2-124m", "tune"],
)
def test_a_command_that_moved_says_where_it_is(arguments):
    name, *rest = arguments.split()
    assert f"`tilewise {name}` is now `python -m studies " in sentence(call(name, *rest))


def needed_by(*packages):
    """The files and folders in site-packages of these packages, and of all that they require."""
    waiting, seen, found = [*packages], set(), {}
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        for distribution in [] if name in seen else metadata.distributions(name=name):
            waiting += [re.match(r"[\w.-]+", line)[0] for line in distribution.requires or () if "extra ==" not in line]
            found |= {file.parts[0]: distribution.locate_file(file.parts[0]) for file in distribution.files or ()}
        seen.add(name)
    return {name: path for name, path in found.items() if name not in ("..", "__pycache__")}


@pytest.fixture(scope="module", params=["Triton", "no Triton"])
def alone(request, tmp_path_factory):
    """Run a Python that finds torch and what it requires, and in one case Triton; nothing else."""
    folder, found = tmp_path_factory.mktemp("alone"), needed_by("torch", "triton")
    if "torch" not in found:
        pytest.skip("nothing says which files torch has")
    for name, path in found.items():
        if name != "triton" or request.param == "Triton":
            (folder / name).symlink_to(path)
    (folder / "command.py").symlink_to(command.__file__)
    path = os.pathsep.join(map(str, (ROOT / "src", folder)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def python(*words, cwd):
        command = [sys.executable, "-S", *words]  # without site-packages
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return python


PRINTS = {
    "--version": f"tilewise {tw.__version__}\n",
    "--help": "usage: python -m tilewise COMMAND",
    "info": "Back ends\n",
    "explain --device cpu": "cpu       runs this",
    "warm --device cpu": "nothing to compile",
    "shadow wheels": "flash_attn-2.8.3-py3-none-any.whl",
    "run --help": "usage: python -m tilewise run",
}


def test_torch_is_all_that_commands_need(alone, tmp_path):
    program = "import json, sys, command; print(json.dumps([command.call(*one.split()) for one in sys.argv[1:]]))"
    found = dict(zip(PRINTS, json.loads(alone("-c", program, *PRINTS, cwd=tmp_path)), strict=True))
    for words, (status, stdout, stderr) in found.items():
        assert status == 0, (words, stderr)
        assert PRINTS[words] in stdout
        assert "\x1b" not in stdout + stderr


def test_torch_is_all_that_a_script_needs(alone, tmp_path):
    look = "print(sys.argv, *(find_spec(name) is not None for name in ('typer', 'rich', 'numpy')))"
    (tmp_path / "script.py").write_text(f"import sys\nfrom importlib.util import find_spec\n{look}\n")
    shown = alone("-m", "tilewise", "run", "--sdpa", "script.py", "--lr", "3", cwd=tmp_path)
    assert shown == "['script.py', '--lr', '3'] False False False\n"
