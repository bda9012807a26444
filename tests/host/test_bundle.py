"""Bundles: what they hold is not compiled, what does not fit is not found, and what is unsafe is refused."""

import hashlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from command import call
from scripts import ROOT, folder_of, lines

import tilewise as tw
from tilewise.host import bundle as module
from tilewise.host.bundle import use_bundle

pytest.importorskip("triton")
from triton import __version__, knobs

KERNELS = [
    "attention_forward",
    *("attention_backward_preprocess", "attention_backward", "attention_backward_postprocess"),
]
STEP = "sm_90 D 64 32:8 causal 2048 "
"""The call of first.py's step, as tools/kernels_wheel.py names it."""
compiler = [
    pytest.mark.compile,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="a GPU's own driver is there: see tests/card"),
    pytest.mark.skipif(not any(os.access(Path(p, "cc"), os.X_OK) for p in os.get_exec_path()), reason="no C compiler"),
]


def compiles(test):
    """Mark a test that compiles, and launches by a driver that does nothing."""
    for mark in compiler:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A bundle of a step's kernels with its hash, and the cache in which they were compiled."""
    folder = tmp_path_factory.mktemp("warmed")
    words = "warm --device sm_90 --q 4,2048,32,64 --kv-heads 8 --mask causal --json --save"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "tilewise", *words.split(), str(folder / "step.zip")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "step.zip", json.loads(done.stdout)["bundle"]["sha256"], folder / "cache"


def step(**variables):
    """What first.py prints of a step: its passes, and its end."""
    *_, forward, backward, end = lines("host/first.py", "step", "2048", FIRST_D="64", OMP_NUM_THREADS="1", **variables)
    return [forward, backward], end


def nothing_was_compiled(passes, end):
    """Tell whether a step was taken without reading a kernel's source."""
    assert {name for one in passes for name in one["found"]} == {*KERNELS}, "some of them beside the forward, too"
    assert [one["launched"] for one in passes] == [1, 3]
    return not end["read"] and not any(one["compiled"] for one in passes)


def binaries(cache):
    """The machine code in a cache, by name."""
    return {path.name: path.read_bytes() for path in cache.rglob("*.cubin")}


@compiles
def test_a_step_with_a_bundle_and_an_empty_cache_compiles_nothing(warmed, tmp_path):
    path, hash, compiled = warmed
    passes, end = step(TRITON_CACHE_DIR=str(tmp_path / "cache"), TILEWISE_BUNDLE=f"{path}#sha256={hash}")
    assert nothing_was_compiled(passes, end)
    assert sorted(end["unpacked"]) == sorted(KERNELS)
    assert binaries(tmp_path / "cache") == binaries(compiled)
    assert len(binaries(compiled)) == 4
    assert path.stat().st_size < 4 * 30_000
    for file in (tmp_path / "cache").rglob("attention*.json"):
        about = json.loads(file.read_text())
        assert all(Path(place).is_file() for _, place in about["extern_libs"]), "this machine's own"
        assert about["hash"], "and its own key"


@compiles
def test_processes_that_start_together_unpack_each_kernel_once(warmed, tmp_path):
    path, _, _ = warmed
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "FIRST_D": "64", "OMP_NUM_THREADS": "1", "TILEWISE_BUNDLE": str(path),
        "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "host" / "first.py"), "step", "2048"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [[json.loads(line) for line in one.communicate()[0].splitlines()] for one in both]
    for *_, forward, backward, end in printed:
        assert nothing_was_compiled([forward, backward], end)
    assert sorted(name for one in printed for name in one[-1]["unpacked"]) == sorted(KERNELS)


@compiles
@pytest.mark.parametrize("what", ["home", "cache"])
def test_a_step_needs_no_compilation_where_nothing_can_be_written(what, warmed, tmp_path):
    path, _, _ = warmed
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "folder")  # root could write into a folder that is read-only
    variables = {"HOME": place, "TRITON_HOME": place} if what == "home" else {"TRITON_CACHE_DIR": place}
    if what == "home":
        variables["TRITON_CACHE_DIR"] = f"{place}/.triton/cache"
    assert nothing_was_compiled(*step(TILEWISE_BUNDLE=str(path), **variables))


@compiles
def test_kernels_are_saved_alike_in_every_folder_and_found_unless_the_compiler_would_read_something_else(tmp_path):
    import triton

    here, there = tmp_path / "here.zip", tmp_path / "there.zip"
    (first,) = lines("host/bundled.py", "save", str(here), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "src" / "tilewise", elsewhere / "tilewise", ignore=shutil.ignore_patterns("__pycache__"))
    (elsewhere / "triton").symlink_to(Path(triton.__file__).parent)
    other = {"TRITON_CACHE_DIR": str(tmp_path / "another"), "folder": str(elsewhere)}
    (second,) = lines("host/bundled.py", "save", str(there), **other)
    assert first == second
    assert here.read_bytes() == there.read_bytes()
    with zipfile.ZipFile(here) as files:
        whole = b"".join(files.read(name) for name in files.namelist())
        assert len(files.namelist()) == 5
    assert first["sha256"] == hashlib.sha256(here.read_bytes()).hexdigest()
    for folder in (ROOT, tmp_path, Path(triton.__file__).parent, Path.home()):
        assert str(folder).encode() not in whole
    cases = lines("host/bundled.py", "found", str(here), **other)
    *keys, compiled = cases
    assert [one["case"] for one in keys if one["found"]] == ["the same", "another maker's chip", "without lines"]
    assert len(keys) == 8
    assert compiled == {"case": "compiled", "found": True, "said": []}


@compiles
def test_the_newest_triton_takes_them_too(tmp_path):
    where = {"folder": folder_of("newest"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    path = tmp_path / "newest.zip"
    lines("host/bundled.py", "save", str(path), **where)
    *keys, compiled = lines("host/bundled.py", "found", str(path), **where)
    assert [one["case"] for one in keys if one["found"]] == ["the same", "another maker's chip", "without lines"]
    assert compiled["found"]
    with pytest.raises(
        ValueError, match=rf"for Triton {__version__}, which is installed, got .* for Triton 3\.\d+\.\d+"
    ):
        use_bundle(path)


# What is refused. None of it compiles.

KEY = "0" * 64
FILES = {f"{KEY}/kernel.json": b'{"name": "kernel"}', f"{KEY}/kernel.cubin": b"code"}
ABOUT = {"chips": ["sm_80", "sm_90"], "tilewise": tw.__version__, "calls": []}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A bundle of a kernel that is none; and none is in use."""
    monkeypatch.setattr(module, "USED", [])
    monkeypatch.delenv("TILEWISE_BUNDLE", raising=False)
    module.installed.cache_clear()
    yield written(tmp_path / "made.zip", FILES)
    module.installed.cache_clear()


def test_a_bundle_is_named_with_its_hash_by_info_and_explain(path, monkeypatch):
    hash = hashlib.sha256(path.read_bytes()).hexdigest()
    assert use_bundle(path) == use_bundle(str(path), sha256=hash.upper()) == hash
    assert module.described() == [f"{path} sha256={hash}, 1 kernels for sm_80, sm_90"]
    assert f"{path} sha256={hash}" in call("info").stdout
    assert json.loads(call("explain", "--device", "sm_90", "--json").stdout)["bundles"] == module.described()
    shown = call("explain", "--device", "sm_90").stdout.splitlines()
    assert shown[-1] == f"bundle    {module.described()[0]}"
    assert "bundle" not in call("explain", "--device", "cpu").stdout
    monkeypatch.setattr(module, "USED", [])
    second = path.with_name("second.zip")
    written(second, FILES, {"never_run": ["sm_80"]})
    monkeypatch.setenv("TILEWISE_BUNDLE", os.pathsep.join((f"{path}#sha256={hash}", str(second))))
    assert [one.path for one in module.bundles()] == [str(path), str(second)]
    assert "sm_80 (never run on a GPU), sm_90" in module.described()[1]
    monkeypatch.setenv("TILEWISE_BUNDLE", f"{path}#sha256={KEY}")
    assert "refused: sha256 of" in call("info").stdout


def test_importing_the_package_opens_no_bundle_and_imports_no_triton():
    program = "import sys, tilewise; assert 'triton' not in sys.modules; assert 'tilewise_kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TILEWISE_BUNDLE": "missing"}, check=True)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_can_write_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(
        PermissionError, match=rf"others than its owner can write it \(it has mode {mode:o}\); run chmod"
    ):
        use_bundle(path)
    assert module.bundles() == []


def test_another_users_file_is_refused(path, monkeypatch):
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=r"its owner is user \d+, neither you nor root; make a copy"):
        use_bundle(path)


def test_what_is_no_regular_file_is_refused_at_once(path, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    begin = time.monotonic()
    with pytest.raises(PermissionError, match="is not a regular file; name the file"):
        use_bundle(tmp_path / "pipe")
    assert time.monotonic() - begin < 1.0
    for missing, error in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            use_bundle(missing)


def written(path, files, about=None):
    """Write a zip file of these contents."""
    head = {"format": 1, "triton": __version__, **ABOUT, **(about or {})}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("bundle.json", json.dumps(head))
        for name, content in files.items():
            made.writestr(name, content)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("files", "about", "says"),
    [
        ({f"../{KEY}/kernel.json": b""}, {}, "is no file of a kernel"),
        ({f"{KEY}/../kernel.json": b""}, {}, "is no file of a kernel"),
        ({f"/{KEY}/kernel.json": b""}, {}, "is no file of a kernel"),
        ({f"{KEY}/kernel.so": b""}, {}, "is no file of a kernel"),
        ({f"{KEY}/__grp__kernel.json.py": b""}, {}, "is no file of a kernel"),
        ({f"{KEY}/kernel.cubin": bytes((32 << 20) + 1)}, {}, "has 33554433 bytes, and may have 33554432"),
        ({f"{KEY}/kernel.json": b"{}"}, {}, "a kernel has not two files"),
        ({}, {"format": 2}, "it has format 2, and this tilewise reads 1"),
        ({}, {"triton": "3.5.9"}, rf"for Triton {__version__}, which is installed, got .* for Triton 3\.5\.9; write"),
    ],
)  # fmt: skip
def test_what_a_bundle_cannot_hold_is_refused(files, about, says, path):
    with pytest.raises(ValueError, match=f"bundle must be .*{says}"):
        use_bundle(written(path, files, about))
    assert module.bundles() == []


def test_a_file_that_is_cut_or_has_another_hash_is_refused(path):
    whole = path.read_bytes()
    for wrong in (b"", whole[:-30], b"text"):
        path.write_bytes(wrong)
        with pytest.raises(
            ValueError, match=r"bundle must be a file that `tilewise warm --save` wrote, got .*; write it"
        ):
            use_bundle(path)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=rf"sha256 of .* must be {KEY}, got [0-9a-f]{{64}}; use the file"):
        use_bundle(path, sha256=KEY)


@pytest.mark.parametrize("what", ["damaged", "longer than it says"])
def test_a_kernel_that_is_not_whole_leaves_the_cache_as_it_was(what, path, tmp_path, monkeypatch):
    content = bytes(range(256)) * 40
    written(path, {f"{KEY}/kernel.json": b"{}", f"{KEY}/kernel.cubin": content})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        about = files.getinfo(f"{KEY}/kernel.cubin")
    if what == "damaged":
        data[about.header_offset + 30 + len(about.filename) + 5] ^= 255
    else:
        size = len(content).to_bytes(4, "little")
        assert data.count(size) >= 2
        data = data.replace(size, (100).to_bytes(4, "little"))
    path.write_bytes(data)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "portable_key", lambda *_: (KEY, None))
    use_bundle(path)
    with pytest.raises(ValueError, match=r"bundle must be whole, got .*; write it again"):
        module.unpack("key", "kernel", lambda: None)
    assert not list(tmp_path.glob("cache/**/*.*"))
    assert not module.unpack("key", "another", lambda: None), "a name that does not fit"


# The wheel


@pytest.fixture(scope="module")
def kernels():
    """tools/kernels_wheel.py."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("kernels_wheel")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@compiles
def test_the_wheel_is_found_by_itself_and_its_kernels_are_not_compiled(warmed, tmp_path):
    for name in ("build", "hatchling"):
        pytest.importorskip(name)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(warmed[2])}
    command = [sys.executable, str(ROOT / "tools" / "kernels_wheel.py"), "--out", str(tmp_path), "--only", STEP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"tilewise_kernels-{tw.__version__}-py3-none-any.whl"
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
        assert (
            f"Requires-Dist: tilewise=={tw.__version__}"
            in files.read(f"tilewise_kernels-{tw.__version__}.dist-info/METADATA").decode()
        )
    data = (site / "tilewise_kernels" / f"triton-{__version__}.zip").read_bytes()
    assert f"4 kernels, {len(data)} bytes, sha256={hashlib.sha256(data).hexdigest()}" in done.stdout
    assert nothing_was_compiled(*step(folder=str(site), TRITON_CACHE_DIR=str(tmp_path / "cache")))


def test_an_installed_bundle_is_checked_as_any_other(path, tmp_path, monkeypatch):
    (tmp_path / "tilewise_kernels").mkdir()
    (tmp_path / "tilewise_kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module.bundles() == [], "none for this Triton"
    own = tmp_path / "tilewise_kernels" / f"triton-{__version__}.zip"
    shutil.copy(path, own)
    module.installed.cache_clear()
    assert [one.path for one in module.bundles()] == [str(own)]
    own.chmod(0o666)
    module.installed.cache_clear()
    with pytest.warns(RuntimeWarning, match="kernels that are installed are not used: .*others than its owner"):
        assert module.bundles() == []
    assert "tilewise_kernels" not in sys.modules


def test_the_recipe_of_the_wheel_names_common_calls(kernels):
    named = {chip: [name for name, _ in kernels.calls(chip)] for chip in kernels.CHIPS}
    assert STEP.strip() in named["sm_90"]
    for name in ("D 64", "D 128", "D 256", "causal", "full", "varlen", "32:8", "decode"):
        assert any(name in one for one in named["sm_90"]), name
    assert all(named.values())
    assert kernels.LIMIT == 5_000_000
