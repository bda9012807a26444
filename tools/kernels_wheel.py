"""Build the wheel tilewise-kernels, compiled kernels of common calls: `make wheel-kernels`.

It holds a bundle (src/tilewise/host/bundle.py) for each Triton: the installed one, and those of the folders that
--triton names. Only kernels for CHIPS[0] have run on a GPU. What Triton's cache (TRITON_CACHE_DIR) has is not compiled
again. The hashes that it prints belong into a release's notes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import tilewise as tw
from tilewise.host.bundle import WHEEL, installed_triton
from tilewise.warm.save import save
from tilewise.warm.warm import Call, call_of, warm_calls

ROOT = Path(__file__).parents[1]
LIMIT = 5_000_000
"""Bytes of the wheel."""
CHIPS = ("sm_90", "sm_80", "sm_100", "gfx942")
SIZES, HEADS = (64, 128, 256), ((16, 16), (32, 8))
"""Head sizes, and heads of queries and of keys; kernels depend on their ratio alone."""
CALLS = (("causal", 4, 2048), ("decode", 8, 1))
MORE = (("causal", 1, 777), ("causal", 4, 256), ("full", 4, 2048), ("full", 1, 777), ("varlen", 4, 2048))
"""Kinds of calls, with batches and lengths that differ in their tiles; these for CHIPS[0] alone."""
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "tilewise-kernels"
version = "{version}"
description = "Compiled kernels of tilewise for common calls, which then need no compilation"
requires-python = ">=3.10"
license = "BSD-3-Clause"
license-files = ["LICENSE"]
dependencies = ["tilewise=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
core-metadata-version = "2.4"
"""
PACKAGE = '''"""Compiled kernels: a bundle for each release of Triton, which tilewise finds by itself."""\n'''


def calls(chip: str) -> Iterator[tuple[str, Any]]:
    """Yield the calls whose kernels the wheel has, each as a name and a function that returns its arguments."""
    run = chip == CHIPS[0]
    for D, (H, K), (kind, B, M) in product(SIZES if run else SIZES[:2], HEADS, CALLS + MORE if run else CALLS):
        yield f"{chip} D {D} {H}:{K} {kind} {M}", partial(KINDS[kind], B, M, H, K, D)


def dense(B: int, M: int, H: int, K: int, D: int, mask: tw.Mask) -> dict[str, Any]:
    """Return the arguments of a training step's call."""
    k = of(B, M, K, D)
    return {"q": of(B, M, H, D), "k": k, "v": k, "mask": mask}


def varlen(B: int, M: int, H: int, K: int, D: int) -> dict[str, Any]:
    """Return those of packed sequences."""
    k, ends = of(B * M, K, D), of(B + 1, dtype=torch.int32)
    layout = tw.Varlen(ends, ends, M, M)
    return {"q": of(B * M, H, D), "k": k, "v": k, "mask": tw.Causal(), "layout": layout}


def decode(B: int, M: int, H: int, K: int, D: int, page: int = 16) -> dict[str, Any]:
    """Return those of queries whose keys are in a cache of pages, which have no gradients."""
    k = of(B * 256, page, K, D)
    layout = tw.Cached(of(B, dtype=torch.int32), of(B, 256, dtype=torch.int32))
    return {"q": of(B, M, H, D), "k": k, "v": k, "mask": tw.Causal(), "layout": layout, "backward": False}


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "causal": partial(dense, mask=tw.Causal()),
    "full": partial(dense, mask=tw.Full()),
    "varlen": varlen,
    "decode": decode,
}


def bundle(folder: Path, only: str) -> None:
    """Write the bundle for this process's Triton."""
    files: dict[str, bytes] = {}
    made: list[Call] = []
    for chip in CHIPS:
        found = [call_of(chip, **{"backward": True, **given()}) for name, given in calls(chip) if only in f"{name} "]
        if found:
            warm_calls(found, None, lambda done, count, name, chip=chip: tell(f"{chip} {done}/{count} {name}"), files)
            made += found
    if not made:
        sys.exit(f"--only must be part of a call's name, got {only!r}; write 'causal' or the like")
    path = folder / f"triton-{installed_triton()}.zip"
    hash = save(str(path), files, made, {call.problem.target for call in made} - {CHIPS[0]})
    print(f"{path.name}: {len(files) // 2} kernels, {path.stat().st_size} bytes, sha256={hash}", flush=True)


def tell(text: str) -> None:
    """Print what is done, with the seconds since the start."""
    print(f"{time.perf_counter() - BEGUN:5.0f} s  Triton {installed_triton()}  {text}", file=sys.stderr, flush=True)


def build(out: Path, folders: list[str], only: str) -> Path:
    """Write the wheel, and return its path."""
    with TemporaryDirectory() as made:
        project = Path(made)
        package = project / WHEEL
        package.mkdir()
        (package / "__init__.py").write_text(PACKAGE)
        (project / "pyproject.toml").write_text(PROJECT.format(version=tw.__version__, package=WHEEL))
        shutil.copy(ROOT / "LICENSE", project)
        for folder in (None, *folders):
            path = os.pathsep.join(filter(None, [folder, *sys.path]))
            command = [sys.executable, __file__, "--bundle", str(package), "--only", only]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), made]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    wheel = out / f"{WHEEL}-{tw.__version__}-py3-none-any.whl"
    if wheel.stat().st_size >= LIMIT:
        sys.exit(f"{wheel} has {wheel.stat().st_size} bytes, and may have {LIMIT}; name fewer calls in this script")
    return wheel


def main() -> None:
    """Build the wheel, or write one bundle of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes")
    parser.add_argument("--triton", action="append", default=[], metavar="FOLDER", help="another Triton's folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="leave out calls whose name lacks this")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="write this Triton's bundle alone")
    given = parser.parse_args()
    if given.bundle:
        bundle(given.bundle, given.only)
        return
    wheel = build(given.out, [folder for folder in given.triton if folder], given.only)
    hash = hashlib.sha256(wheel.read_bytes()).hexdigest()
    print(f"{wheel}: {wheel.stat().st_size} bytes, sha256={hash}, after {time.perf_counter() - BEGUN:.0f} s")


BEGUN = time.perf_counter()

if __name__ == "__main__":
    main()
