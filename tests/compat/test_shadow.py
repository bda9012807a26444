"""How imports of flash_attn find tilewise: the finder and the wheel show the same; the original is not hidden."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import tilewise as tw
from tilewise import compat
from tilewise.compat.shadow import MODULES, PACKAGES, is_shadow, who, write_wheel

SOURCE = Path(tw.__file__).parents[1]
ALL = tuple(PACKAGES)


def left() -> list[str]:
    """Modules of ours, or of anyone, under the names that we answer for."""
    return [name for name in sys.modules if name in MODULES or name.partition(".")[0] == "flash_attn"]


@pytest.fixture(autouse=True)
def unchanged():
    """Nothing stays behind a test, and none can run where a flash_attn is imported."""
    if left():
        pytest.skip(f"{left()[0]} is imported in this process")
    before = list(sys.meta_path)
    yield
    compat.uninstall()
    assert left() == []
    assert sys.meta_path == before
    importlib.invalidate_caches()


@pytest.fixture
def original(tmp_path, monkeypatch):
    """A folder with somebody else's flash_attn."""
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '2.7.4'\n")
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    for name in left():
        del sys.modules[name]


SHOW = """
import importlib, importlib.util, json, sys
from importlib import metadata
from tilewise.compat import install
from tilewise.compat.shadow import MODULES, PACKAGES
if sys.argv[1:]:
    install(*PACKAGES)
shown = {}
for name in MODULES:
    assert importlib.util.find_spec(name)
    module = importlib.import_module(name)
    public = {n: f"{v.__module__}.{v.__name__}" if hasattr(v, "__module__") else repr(v)
              for n in module.__all__ for v in [getattr(module, n)]}
    shown[name] = public, getattr(module, "__version__", None), module.__tilewise__, hasattr(module, "__path__"), \\
        hasattr(module, "losses"), module.__doc__
tops = metadata.packages_distributions()
owners = {top: sorted(tops[top]) for top in {name.partition(".")[0] for name in MODULES}}
read = {d: (metadata.version(d), metadata.requires(d)) for d in [p.distribution for p in PACKAGES.values()]}
print(json.dumps([shown, owners, read], sort_keys=True))
"""


def show(*arguments: str, site: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(SOURCE)])}
    command = [sys.executable, "-W", "ignore", "-c", SHOW, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=site.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_finder_and_the_wheel_show_the_same(tmp_path):
    site = tmp_path / "site"
    for package in ALL:
        with zipfile.ZipFile(write_wheel(package, tmp_path / "wheels")) as wheel:
            wheel.extractall(site)
    empty = tmp_path / "empty"
    empty.mkdir()
    found = show("install", site=empty)
    assert found == show(site=site)
    shown, owners, read = json.loads(found)
    assert shown["flash_attn"][0]["flash_attn_func"] == (
        "tilewise.compat.flash_attn.flash_attn_interface.flash_attn_func"
    )
    assert {name: version for name, (_, version, *_) in shown.items() if version} == {
        "flash_attn": "2.8.3",
        "flash_attn.cute": "4.0.0",
        "flash_attn_interface": "3.0.0",
    }
    assert not any(losses for *_, losses, _ in shown.values())
    assert owners["flash_attn"] == ["flash-attn", "flash-attn-4"]
    assert owners["flash_attn_interface"] == owners["flash_attn_3"] == ["flash-attn-3"]
    assert read["flash-attn"] == ["2.8.3", ["tilewise"]]


def test_a_wheel_is_one_that_pip_installs(tmp_path):
    pytest.importorskip("pip")
    wheels = [write_wheel(package, tmp_path / "wheels") for package in ALL]
    assert [wheel.name for wheel in wheels] == [
        "flash_attn-2.8.3-py3-none-any.whl",
        "flash_attn_4-4.0.0-py3-none-any.whl",
        "flash_attn_3-3.0.0-py3-none-any.whl",
    ]
    assert all(wheel.stat().st_size < 6_000 for wheel in wheels)
    site = tmp_path / "site"
    pip = [sys.executable, "-W", "ignore", "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "-q", "--no-deps", "--no-index", "--target", site, *wheels]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(show(site=site))[2]["flash-attn-4"] == ["4.0.0", ["tilewise"]]
    assert (site / "flash_attn" / "cute" / "__init__.py").exists()


def test_a_wheel_is_not_written_through_a_link(tmp_path):
    wheel, mine = write_wheel("flash_attn", tmp_path / "wheels"), tmp_path / "mine.txt"
    content, mode = wheel.read_bytes(), wheel.stat().st_mode
    mine.write_text("mine")
    wheel.unlink()
    wheel.symlink_to(mine)
    assert write_wheel("flash_attn", tmp_path / "wheels") == wheel
    assert mine.read_text() == "mine"
    assert not wheel.is_symlink()
    assert (wheel.read_bytes(), wheel.stat().st_mode) == (content, mode)
    assert list(wheel.parent.iterdir()) == [wheel]


def test_install_answers_imports_and_uninstall_stops():
    assert who("flash_attn") == "nobody"
    compat.install("flash_attn")
    compat.install("flash_attn")
    assert who("flash_attn") == "tilewise, in this process"
    flash_attn = importlib.import_module("flash_attn")
    assert flash_attn.__version__ == metadata.version("flash_attn") == "2.8.3"
    assert flash_attn.__tilewise__
    assert flash_attn.__spec__.name == "flash_attn"
    assert flash_attn.flash_attn_interface.flash_attn_gpu.fwd is importlib.import_module("flash_attn_2_cuda").fwd
    assert not hasattr(flash_attn, "losses")
    with pytest.raises(AttributeError, match="flash_attn is tilewise's, which has no losses; install the original"):
        flash_attn.losses  # noqa: B018
    for missing in ("flash_attn.losses", "flash_attn.cute"):
        with pytest.raises(ImportError, match=missing):
            importlib.import_module(missing)
    assert importlib.util.find_spec("flash_attn_interface") is None
    compat.uninstall("flash_attn")
    assert left() == []
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash_attn")


def test_version_4_stands_alone():
    compat.install("flash_attn.cute")
    cute = importlib.import_module("flash_attn.cute")
    assert cute.flash_attn_func is tw.compat.flash_attn.cute.flash_attn_func
    assert importlib.import_module("flash_attn.cute.interface").flash_attn_func is cute.flash_attn_func
    assert not hasattr(sys.modules["flash_attn"], "flash_attn_func")
    compat.uninstall("flash_attn")
    assert sys.modules["flash_attn"].cute is cute
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash-attn")


def test_every_name_that_is_shown_is_there():
    for package in PACKAGES.values():
        for name, ours in package.modules.items():
            assert ours == "" or importlib.import_module(f"tilewise.compat.{ours}").__all__, name


@pytest.mark.parametrize("names", [(), ("flash_attention",), ("flash_attn", "torch")])
def test_an_unknown_name_is_refused(names):
    with pytest.raises(ValueError, match=r"packages must be some of flash_attn, .*got .*; name at least one"):
        compat.install(*names)
    if names:
        with pytest.raises(ValueError, match="packages must be some of"):
            compat.uninstall(*names)


def test_the_original_is_not_hidden(original, tmp_path):
    assert who("flash_attn") == "the original"
    with pytest.raises(RuntimeError, match=r"flash_attn is installed, at .*__init__.py; remove it, or pass force=True"):
        compat.install("flash_attn")
    with pytest.raises(RuntimeError, match="flash_attn is installed"):
        write_wheel("flash_attn", tmp_path)
    assert left() == []
    assert write_wheel("flash_attn", tmp_path, force=True).exists()
    compat.install("flash_attn", force=True)
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    compat.uninstall()
    assert importlib.import_module("flash_attn").__version__ == "2.7.4"
    with pytest.raises(RuntimeError, match="flash_attn is imported already; call install before"):
        compat.install("flash_attn", force=True)


def test_version_4_beside_an_original_version_2(original):
    compat.install("flash_attn.cute")
    assert importlib.import_module("flash_attn.cute").__version__ == "4.0.0"
    flash_attn = sys.modules["flash_attn"]
    assert flash_attn.__version__ == "2.7.4"
    compat.uninstall()
    assert not hasattr(flash_attn, "cute")
    (original / "cute.py").write_text("")
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError, match=r"flash_attn.cute is installed, at .*cute.py"):
        compat.install("flash_attn.cute")


def test_where_the_wheel_is_installed_install_has_nothing_to_do(tmp_path, monkeypatch):
    with zipfile.ZipFile(write_wheel("flash_attn", tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert is_shadow("flash_attn")
    assert who("flash_attn") == "tilewise, by its wheel"
    compat.install("flash_attn")
    assert who("flash_attn") == "tilewise, by its wheel"
    assert write_wheel("flash_attn", tmp_path / "again").exists()
