"""tilewise run: a script sees what Python itself shows it, and ends as it would; then a line says what ran where."""

import os
import subprocess
import sys
import zipfile

import preloaded
import pytest

LOOK = """
import sys
main = sys.modules["__main__"]
names = ("__name__", "__file__", "__package__", "__cached__")
print(sys.argv, sys.path[0], [getattr(main, name, None) for name in names], main.__dict__ is globals())
print(type(__builtins__), type(__loader__), getattr(__spec__, "name", None), sorted({*globals()} - {"__annotations__"}))
class Pickled: pass
import pickle
pickle.loads(pickle.dumps(Pickled()))
if "exit" in sys.argv: sys.exit(7)
if "raise" in sys.argv: raise ValueError("wrong")
if "fork" in sys.argv:
    import os
    if not (child := os.fork()): sys.exit(0)
    os.waitpid(child, 0)
"""
ATTEND = """
import torch, torch.nn.functional as F
from tilewise.compat import sdpa
q = torch.randn(1, 2, 5, 8)
F.scaled_dot_product_attention(q, q, q)
sdpa.uninstall()
sdpa.install(devices=("cpu",), always=True)
F.scaled_dot_product_attention(q, q, q)
F.scaled_dot_product_attention(q, q, q[None])
"""
IMPORT = """
import flash_attn, torch
q = torch.randn(1, 5, 2, 8)
flash_attn.flash_attn_func(q, q, q)
print(flash_attn.__tilewise__)
"""
NOTHING = "tilewise: ran 0 calls; 0 calls fell back to PyTorch"
IMPORTS = ("tilewise.cli.run", "tilewise.compat.sdpa")


@pytest.fixture
def folder(tmp_path):
    """A folder with the script as a file, in a package and in an archive."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for name in ("script.py", "package/__main__.py", "package/module.py"):
        (tmp_path / name).write_text(LOOK)
    (tmp_path / "imports.py").write_text("import absent")
    (tmp_path / "attends.py").write_text(ATTEND)
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    return tmp_path


def python(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def run(folder, *arguments):
    return preloaded.run("-m", "tilewise", "run", *arguments, imports=IMPORTS, cwd=folder)


@pytest.mark.parametrize(
    "arguments",
    [
        "script.py a --sdpa -m --help",
        "script.py -- --x",
        "-m package -- -m --",
        "./package/../script.py",
        "-m package --lr 3 -h",
        "-m package.module",
        "package q",
        "archive.pyz q",
        "script.py exit",
        "script.py raise",
        "script.py fork",
    ],
)
def test_a_script_sees_what_python_shows_it(folder, arguments):
    expected, found = python(folder, *arguments.split()), run(folder, "--sdpa", *arguments.split())
    assert found.stdout == expected.stdout
    assert found.returncode == expected.returncode
    *errors, says = found.stderr.splitlines()
    assert says == NOTHING
    assert errors[-1:] == expected.stderr.splitlines()[-1:]
    assert found.stderr.count("tilewise: ran") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("absent.py", 2, "No such file"),
        ("-m absent", 1, "No module named absent"),
        ("-m imports", 1, "No module named 'absent'"),
        ("--sdpa -m", 2, "arguments are required: TARGET; run python -m tilewise run --help"),
        ("--tpu script.py", 2, "got --tpu; run python -m tilewise run --help"),
    ],
)
def test_what_cannot_run_ends_as_in_python(folder, arguments, status, says):
    done = run(folder, *arguments.split())
    assert done.returncode == status
    assert says in done.stderr
    if "tilewise run --help" not in says:
        assert python(folder, *arguments.split()).returncode == status


def test_a_line_says_what_ran_where(folder):
    done = run(folder, "--sdpa", "attends.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "tilewise: ran 1 call (cpu: 1); 2 calls fell back to PyTorch "
        "(it is on a CPU: 1, tensors of more than 4 dimensions, or of several ranks: 1)"
    )


def test_imports_of_flash_attn_are_answered(folder):
    (folder / "imports_flash_attn.py").write_text(IMPORT)
    done = run(folder, "--flash-attn", "imports_flash_attn.py")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert done.stderr.splitlines()[-1] == "tilewise: ran 1 call (cpu: 1); 0 calls fell back to PyTorch"


def test_a_real_flash_attn_is_not_replaced(folder):
    (folder / "flash_attn.py").write_text("")
    done = run(folder, "--flash-attn", "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tilewise run: flash_attn is installed, at ")


def test_options_add_up(folder):
    pytest.importorskip("transformers", reason="transformers is not installed")
    look = "import transformers; print('tilewise' in transformers.AttentionInterface._global_mapping)"
    (folder / "imports_both.py").write_text(f"{IMPORT}\n{look}")
    done = run(folder, "--sdpa", "--hf", "--flash-attn", "imports_both.py")
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_pythons_safe_path_is_kept(folder):
    if sys.version_info < (3, 11):
        pytest.skip("Python has safe_path from 3.11 on")
    safe = {"PYTHONSAFEPATH": "1"}
    expected, found = python(folder, "script.py", **safe), python(folder, "-m", "tilewise", "run", "script.py", **safe)
    assert found.stdout == expected.stdout


def test_under_torchrun_every_rank_tells(folder):
    pytest.importorskip("torch.distributed.run")
    (folder / "ranks.py").write_text("import os, sys; sys.stdout.write(f\"rank {os.environ['RANK']}\\n\")")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tilewise", "run", "--sdpa")
    done = python(folder, *launch, "ranks.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}" in done.stdout
        assert f"tilewise (rank {rank}): ran 0 calls" in done.stderr
