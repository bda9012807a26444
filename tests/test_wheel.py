"""What a user installs: the source distribution, and the wheel that is built from it."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes, message_from_string
from pathlib import Path

import pytest
import torch

import tilewise as tw

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"""\]\(([^)\s]+)|\b(?:href|src|srcset)=["']([^"']+)|^\[[^]]+\]:\s*(\S+)""", re.MULTILINE)
OUTSIDE = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
"""Where the checkout is not found."""


def run(*command, cwd, env=None):
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of both; `build` makes the wheel from the unpacked source distribution."""
    for name in ("build", "hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def sdist(built):
    (path,) = built.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as files:
        return message_from_bytes(files.read(f"tilewise-{tw.__version__}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """The Python of an environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder)
    python = str(folder / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return python


def test_the_source_distribution_is_small_and_has_what_a_reader_wants(sdist):
    assert sdist.stat().st_size < 1_470_000
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "docs/use/guide.md", "tests/conftest.py"} <= names
    assert "src/tilewise/attention/api.py" in names


def test_the_wheel_is_small(wheel):
    with zipfile.ZipFile(wheel) as files:
        beside = ("tilewise/compat/", "tilewise/parallel/")
        layers = sum(one.compress_size for one in files.infolist() if one.filename.startswith(beside))
    assert wheel.stat().st_size - layers <= 492_000  # ADR 0016, and 130 kB of ADRs 0006 and 0017 to 0024
    assert wheel.stat().st_size <= 592_500


def test_the_wheel_has_every_module_and_says_that_it_is_typed(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    source = ROOT / "src"
    assert {path.relative_to(source).as_posix() for path in source.rglob("*.py")} <= names
    assert "tilewise/py.typed" in names
    assert not [name for name in names if not name.startswith(("tilewise/", f"tilewise-{tw.__version__}.dist-info/"))]


def test_metadata_is_what_older_installers_read(metadata):
    assert metadata["Metadata-Version"] == "2.4"
    assert (metadata["Name"], metadata["Version"]) == ("tilewise", tw.__version__)
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert {"Homepage", "Documentation", "Issues", "Changelog"} == set(urls)
    assert all(url.startswith("https://") for url in urls.values())


def test_classifiers_name_pythons_systems_and_types(metadata):
    classifiers = metadata.get_all("Classifier")
    pythons = [f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)]
    assert {*pythons, "Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)


def test_every_link_of_the_long_description_is_absolute(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    links = [target for found in LINK.findall(text) for target in found if target]
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    pictures = re.findall(r'''!\[[^]]*\]\(([^)]+)\)|\bsrc(?:set)?="([^"]+)"''', text)
    pictures = [link for found in pictures for link in found if link]
    assert pictures
    assert all(link.startswith("https://raw.githubusercontent.com/") for link in pictures)
    home = metadata.get_all("Project-URL")[0].split(", ")[1]
    files = [link.removeprefix(f"{home}/blob/main/").partition("#")[0] for link in links if link.startswith(home)]
    files += [link.partition("/main/")[2] for link in pictures]
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert text.splitlines()[0] == (ROOT / "README.md").read_text().splitlines()[0]


def test_an_empty_environment_reads_its_metadata(elsewhere, tmp_path):
    told = run(
        elsewhere, "-c",
        "from importlib import metadata\n"
        "found = metadata.distribution('tilewise')\n"
        "print(found.read_text('METADATA').partition('\\n\\n')[0])\n"
        "print('Command:', [point.value for point in metadata.entry_points(group='console_scripts')][-1])\n"
        "print('Requires:', [line for line in found.requires if 'extra' not in line])",
        cwd=tmp_path, env=OUTSIDE,
    )  # fmt: skip
    fields = message_from_string(told)
    assert fields["Version"] == tw.__version__
    assert fields["Command"] == "tilewise.cli:main"
    assert fields["Requires"] == "['torch>=2.9']"


USER = """\
from typing import Any
import tilewise as tw

def f(x: Any) -> None:
    reveal_type(tw.attention)
    tw.attention(x, x, x, mask=tw.Causal() & tw.Window(3, 0), dropout=0.1)
    tw.attention(x, x, x, mask=3)
    tw.Window("wide", 0)
"""


def test_a_type_checker_reads_its_annotations(elsewhere, tmp_path):
    pytest.importorskip("pyright")
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", elsewhere, "--outputjson", "user.py"],
        cwd=tmp_path, env=OUTSIDE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = json.loads(done.stdout)["generalDiagnostics"]
    (signature,) = [found["message"] for found in told if found["severity"] == "information"]
    assert "return_lse: Literal[False]" in signature
    assert "**options: **Options" in signature
    errors = {
        USER.splitlines()[found["range"]["start"]["line"]].strip() for found in told if found["severity"] == "error"
    }
    assert errors == {"tw.attention(x, x, x, mask=3)", 'tw.Window("wide", 0)'}


def test_the_installed_command_runs_without_the_studies(wheel, elsewhere, tmp_path):
    with zipfile.ZipFile(wheel) as files:
        assert not [name for name in files.namelist() if "studies" in name]
    environment = {**OUTSIDE, "PYTHONPATH": str(Path(torch.__file__).parents[1])}
    shown = run(elsewhere, "-m", "tilewise", "--version", cwd=tmp_path, env=environment)
    assert shown == f"tilewise {tw.__version__}\n"
    script = str(Path(elsewhere).with_name("tilewise"))
    assert "--mask" in run(script, "explain", "--help", cwd=tmp_path, env=environment)
    assert list(tmp_path.iterdir()) == []
