"""What `.ci/run` does: both commands of the README, each in a clone of what is committed; what it says of a demo."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = """#!/bin/sh
echo "make $*"
pwd >> "$RAN"
ls uncommitted 2>/dev/null && exit 9
[ "$1" = "$FAILS" ] && exit 3
[ "$1" = demo ] && cp -r "$DEMO" out
echo "1 passed in 0.01s"
"""
PYTHON = '#!/bin/sh\nexec "$INTERPRETER" "$@"\n'

MADE = {"demo": "make demo PYTHON=python3.11", "test": "make test ARGS=--compile PYTHON=python3.11"}
"""What CI runs."""


def leave(folder, **changes):
    """Write what a demo leaves, with some of it changed."""
    losses = {"losses_standard": [5.3, 3.1], "losses_tilewise": [5.3, 3.2]}
    rows = [{"implementation": name, "status": "ok", "milliseconds": 1.5} for name in ("tilewise", "sdpa", "standard")]
    summary = {
        **losses,
        "settings": {"steps": 2},
        "time_s": {"standard": 2.0, "tilewise": 1.0},
        "losses_equal": True,
        "benchmark": {"rows": rows, "headlines": ["a < b"]},
        **changes,
    }
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    image = "<img alt='a picture' src='data:image/png;base64,'>"
    (folder / "index.html").write_text(f"<td>3.1000</td><td>3.2000</td><li>a &lt; b</li>{image}{image}")
    return folder


def check(folder):
    command = (sys.executable, ROOT / ".ci" / "check_demo.py", folder)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_whole_demo_is_accepted(tmp_path):
    assert check(leave(tmp_path / "out")) == (0, "")


SKIPPED = [{"implementation": name, "status": "skipped", "milliseconds": None} for name in ("tilewise", "standard")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses_standard": [5.3]}, "with standard attention must have a loss for each of 2 steps, got [5.3]"),
        ({"losses_tilewise": [5.3, float("nan")]}, "with tilewise attention must have a loss for each of 2 steps"),
        ({"losses_tilewise": [3.2, 5.3]}, "with tilewise attention must fall, got 3.2 first and 5.3 last"),
        ({"losses_tilewise": [5.3, 3.3]}, "the page must show the last loss with tilewise attention, 3.3000"),
        ({"losses_equal": False}, "must be equal but for rounding"),
        ({"time_s": {"standard": 0.0, "tilewise": 1.0}}, "with standard attention must have a time, got 0.0"),
        ({"benchmark": {"rows": SKIPPED, "headlines": ["a < b"]}}, "must have a time of tilewise, got ['skipped']"),
        ({"benchmark": {"rows": [], "headlines": []}}, "the benchmark must have a sentence, got none"),
        ({"benchmark": {"rows": [], "headlines": ["22x less"]}}, "the page must show '22x less'"),
        ({"settings": {}}, "KeyError: 'steps'"),
    ],
    ids=str,
)
def test_a_demo_without_its_numbers_is_told(tmp_path, changes, said):
    status, told = check(leave(tmp_path / "out", **changes))
    assert status == 1
    assert said in told


def test_a_demo_without_its_files_or_pictures_is_told(tmp_path):
    out = leave(tmp_path / "out")
    (out / "index.html").write_text((out / "index.html").read_text().replace("<img", "<p", 1))
    assert "in pictures, got 1" in check(out)[1]
    (out / "index.html").unlink()
    status, told = check(out)
    assert status == 1
    assert "FileNotFoundError" in told
    assert "index.html" in told


# ---- .ci/run, with other commands in place of make, python3.11 and a browser


@pytest.fixture
def checkout(tmp_path):
    """A repository with `.ci/` committed, and a file that is not."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    folder, tools = tmp_path / "a checkout", tmp_path / "tools"
    shutil.copytree(ROOT / ".ci", folder / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("out/\n")
    git = ("git", "-C", folder, "-c", "user.name=tests", "-c", "user.email=tests@localhost")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "all of it")):
        subprocess.run((*git, *command), check=True)
    (folder / "uncommitted").touch()
    tools.mkdir()
    for name, text in {"make": MAKE, "python3.11": PYTHON, "chromium-headless-shell": "#!/bin/sh\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return folder


@pytest.fixture
def run(checkout, tmp_path):
    """Runs `.ci/run`; returns its status, its output, and the folders in which make ran."""

    def start(fails="", **changes):
        shutil.rmtree(tmp_path / "demo", ignore_errors=True)
        given = {
            "PATH": f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}", "RAN": str(tmp_path / "ran"),
            "DEMO": str(leave(tmp_path / "demo", **changes)), "FAILS": fails, "INTERPRETER": sys.executable,
        }  # fmt: skip
        done = subprocess.run(
            checkout / ".ci" / "run", cwd=tmp_path, env={**os.environ, **given}, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert list((checkout / "out").iterdir()) == [], "clones are removed"
        return done.returncode, done.stdout.splitlines(), (tmp_path / "ran").read_text().splitlines()

    return start


def test_both_commands_run_in_clones_of_what_is_committed(run, checkout):
    status, lines, folders = run()
    passed = "1 passed in 0.01s"
    assert (status, lines) == (0, [MADE["demo"], passed, MADE["test"], passed])
    demo, test = map(Path, folders)
    assert demo != test
    assert demo.is_relative_to(checkout)
    assert not demo.exists()
    assert not test.exists()


@pytest.mark.parametrize("command", ["demo", "test"])
def test_a_command_that_fails_is_the_end(run, command):
    status, lines, _ = run(fails=command)
    assert (status, lines[-1]) == (3, MADE[command])


def test_a_demo_without_numbers_is_the_end(run):
    status, lines, folders = run(losses_equal=False)
    assert status == 1
    assert "must be equal but for rounding" in lines[-1]
    assert len(folders) == 1


def test_a_shallow_checkout_without_a_branch_will_do(run, checkout):
    """As CI's own are."""
    full = checkout.rename(checkout.with_name("full"))
    subprocess.run(("git", "clone", "--quiet", "--depth", "1", full.as_uri(), checkout), check=True)
    git = ("git", "-C", checkout, "-c", "user.name=tests", "-c", "user.email=tests@localhost")
    for command in (("checkout", "--quiet", "--detach"), ("commit", "--quiet", "--allow-empty", "--message", "merged")):
        subprocess.run((*git, *command), check=True)
    status, lines, folders = run()
    assert status == 0, lines
    assert len(folders) == 2
