"""When a test of kernels is repeated: when code that it reads has changed, and not for a comment."""

import re
import shutil
from pathlib import Path

import once
import pytest
import torch

TESTS = Path(__file__).parent / "triton"
MARK = re.compile(r"mark\.once\((.+?)\)", re.DOTALL)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The package and the tests in a folder where they may be edited."""
    shutil.copytree(once.PACKAGE, tmp_path / "tilewise")
    shutil.copytree(TESTS, tmp_path / "triton", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(once, "PACKAGE", tmp_path / "tilewise")
    return tmp_path


def key(folder):
    return once.key(folder / "triton" / "test_compile.py", ("offline.py", "spills.json"))


@pytest.mark.parametrize("file", ["tilewise/tile/softmax.py", "tilewise/call/problem.py", "triton/offline.py"])
def test_code_counts_and_comments_do_not(copy, file):
    before, path = key(copy), copy / file
    path.write_text("# a comment\n" + path.read_text())
    assert key(copy) == before
    path.write_text(path.read_text() + "\nNEW = 1\n")
    assert key(copy) != before


def test_what_is_allowed_counts(copy):
    before = key(copy)
    (copy / "triton" / "spills.json").write_text("{}\n")
    assert key(copy) != before


def test_what_does_not_count_exists():
    assert all((once.PACKAGE / name).exists() for name in once.ELSEWHERE)


@pytest.mark.parametrize("file", ["cli/info.py", "parallel/ring.py", "hopper/tiles.py"])
def test_commands_ranks_and_other_kernels_do_not_count(copy, file):
    before = key(copy)
    (copy / "tilewise" / file).write_text("")
    assert key(copy) == before


def test_hopper_kernels_count_where_they_are_compiled(copy):
    shutil.copytree(TESTS.parent / "hopper", copy / "hopper", ignore=shutil.ignore_patterns("__pycache__"))
    before = once.key(copy / "hopper" / "test_compile.py", ())
    (copy / "tilewise" / "hopper" / "tiles.py").write_text("")
    assert once.key(copy / "hopper" / "test_compile.py", ()) != before


def test_files_of_a_folder_count(copy):
    before = once.key(copy / "triton" / "test_compile.py", ("../other",))
    (copy / "other").mkdir()
    (copy / "other" / "new.py").write_text("NEW = 1\n")
    assert once.key(copy / "triton" / "test_compile.py", ("../other",)) != before


def test_what_tests_read_exists():
    found = [(file, reads) for file in TESTS.parent.rglob("test_*.py") for reads in MARK.findall(file.read_text())]
    assert len(found) >= 8
    for file, reads in found:
        for name in re.findall(r'"(.+?)"', reads):
            assert (file.parent / name).exists(), (file, name)


def test_another_triton_counts(copy, monkeypatch, tmp_path):
    before = key(copy)
    (tmp_path / "newest" / "triton-9.9.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("TILEWISE_TRITON_NEWEST", str(tmp_path / "newest"))
    assert key(copy) != before


def test_another_pytorch_counts(copy, monkeypatch):
    before, version = key(copy), once.metadata.version
    for new, same in ((version("torch").partition("+")[0] + "+elsewhere", True), ("9.9.0", False)):
        monkeypatch.setattr(once.metadata, "version", lambda name, new=new: new if name == "torch" else version(name))
        assert (key(copy) == before) is same


def test_a_gpu_counts(copy, monkeypatch):
    """On it the same test runs kernels instead of interpreting them."""
    before, is_there = key(copy), torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not is_there)
    assert key(copy) != before


def test_without_triton_tests_are_collected(copy, monkeypatch):
    version = once.metadata.version

    def absent(name):
        if name == "triton":
            raise once.metadata.PackageNotFoundError(name)
        return version(name)

    before = key(copy)
    monkeypatch.setattr(once.metadata, "version", absent)
    assert key(copy) != before


def test_tests_that_passed_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(once, "RECORD", tmp_path / "once.json")
    assert once.read() == {}
    once.keep({"a.py::b": "1", "a.py::c[one[0]-two]": "2", "a.py::c[three]": "2"})
    once.keep({"a.py::b": "3"})
    assert once.read() == {"a.py::b": "3", "a.py::c[one[0]-two]": "2", "a.py::c[three]": "2"}
