"""Launches on a GPU that is not here, as far as a CPU goes: kernels compile, and what would start them does nothing.

Run it in a separate process with TRITON_INTERPRET=0, and prints JSON:

    python tests/elsewhere.py keys               hashes of the kernels that calls compile, and that `warm` foresees
    python tests/elsewhere.py ranks FOLDER       compilations by processes that start together, by case
"""

import errno
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver

import tilewise as tw
from tilewise.attention.api import with_defaults
from tilewise.call.backend import BACKWARD, FORWARD, planned
from tilewise.call.check import check_arguments, describe
from tilewise.host import compile_once
from tilewise.host.launch import Launch
from tilewise.warm import precompile
from tilewise.warm.cross_compile import TargetDriver, gpu_target
from tilewise.warm.warm import call_of


class Pretended(TargetDriver):
    """A driver whose launches do nothing."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20}, load_binary=lambda *_: (1, 1, 0, 0, 1024)
    )

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        return lambda *_: None


class Ready:
    """A kernel that was not compiled."""

    function = packed_metadata = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    launch_metadata = run


# Calls


def calls(device: str) -> dict[str, dict[str, Any]]:
    """Arguments of attention."""

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    B, S, H, D = 2, 256, 4, 64
    q, k, wide, parts = of(B, S, H, D), of(B, S, 2, D), of(B, S, H, 128), of(B, S, 3, H, D).unbind(2)
    single, packed, ends = of(B, S, H, D, dtype=torch.float32), of(500, H, D), of(B + 1, dtype=torch.int32)
    slopes, lengths = of(H, dtype=torch.float32), of(B, dtype=torch.int32)
    found: dict[str, dict[str, Any]] = {
        "causal": {"q": q, "k": q, "v": q, "mask": tw.Causal()},
        "grouped": {"q": q, "k": k, "v": k, "mask": tw.Causal()},
        "parts": {"q": parts[0], "k": parts[1], "v": parts[2], "mask": tw.Causal()},
        "wide": {"q": wide, "k": wide, "v": wide, "mask": tw.Window(100, 0), "deterministic": True},
        "fp32": {"q": single, "k": single, "v": single, "mask": tw.Causal(), "precision": "bf16x6"},
        "packed": {"q": packed, "k": packed, "v": packed, "layout": tw.Varlen(ends, ends, 300, 300)},
        "lse": {"q": q, "k": q, "v": q, "return_lse": True},
        "combined": {
            "q": q, "k": k, "v": k, "mask": tw.Causal() & tw.Padding(lengths), "sink": slopes, "dropout": 0.1,
            "score": (tw.SoftCap(30.0), tw.Alibi(slopes), tw.Bias(of(1, H, S, S).requires_grad_())),
        },
        "listed": {"q": q, "k": q, "v": q, "mask": tw.Dense(of(S, S, dtype=torch.bool)) & tw.Causal()},
    }  # fmt: skip
    return found | {f"{name} triton": {**given, "backend": "triton"} for name, given in found.items()}


def run(target: str, given: dict[str, Any], backward: bool = True) -> None:
    """A call as `attention` and autograd make it on a GPU."""
    options = with_defaults("run", {name: value for name, value in given.items() if name not in "qkv"})
    lse, _ = options.pop("return_lse"), options.pop("seed")
    x, recipe, longest = check_arguments(given["q"], given["k"], given["v"], **options)
    p = describe(x, recipe, longest)._replace(target=target)
    saved = planned(p, FORWARD).run(x, torch.zeros((), dtype=torch.int64) if recipe.dropout else None)
    for dlse in (None, saved.lse)[: (1 + lse) * backward]:
        p = describe(x, recipe, longest, tuple(t.requires_grad for t in x.extra))._replace(target=target)
        planned(p, BACKWARD).run(x, saved, torch.zeros_like(saved.o), dlse)


def small() -> dict[str, Any]:
    """A call whose forward compiles in a second."""
    q = torch.zeros(1, 80, 2, 16, dtype=torch.float16)
    return {"q": q, "k": q, "v": q}


# What the tests ask


def keys() -> dict[str, Any]:
    """By call: what it asks Triton for, what `warm` foresees, here and in a new process, and what that could not."""
    metas = {name: call_of("sm_90", True, **given) for name, given in calls("meta").items()}
    alone = together(*[lambda call=call: list(precompile.kernels(call)) for call in metas.values()])
    asked: set[str] = set()

    def record(self: Any, key: str, *_: Any) -> Any:
        asked.add(compile_once.digest(key))
        return Ready()

    submit, compile_once._LockedCompiler.submit = compile_once._LockedCompiler.submit, record  # type: ignore[method-assign]
    found = {}
    for (name, call), there, new in zip(metas.items(), calls("cpu").values(), alone, strict=True):
        kernels, others = precompile.list_kernels(call)
        asked.clear()
        run("sm_90", there)
        foreseen = {kernel.hash: kernel.name for kernel in kernels}
        unforeseen = {what: sorted({n for h, n in by.items() if h not in foreseen}) for what, by in others.items()}
        found[name] = {"asked": sorted(asked), "listed": foreseen, "alone": new, "unforeseen": unforeseen}
    compile_once._LockedCompiler.submit = submit  # type: ignore[method-assign]
    return found


class Counting:
    """Counts by Triton's own hook."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.found: list[str] = []

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self.compiled).append(src.name)


def attend() -> dict[str, Any]:
    """A first call, and what it compiled."""
    knobs.compilation.listener = counting = Counting()
    run("sm_80", small(), backward=False)
    return vars(counting)


def launches() -> list[Launch]:
    """Two kernels that compile in a moment: rowsum(dO * O), and less dlse."""
    asked = call_of("sm_80", True, **small(), return_lse=True)
    return [launch for launch in precompile.launches(asked) if launch.kernel.fn.__name__ == "attention_backward_delta"]


def rank(before: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """One process: the launches, and how many it compiled."""
    knobs.compilation.listener = counting = Counting()
    before()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for launch in launches():
            launch.run()
            launch.run()  # compiled already
    return vars(counting) | {"said": [str(w.message) for w in said]}


def together(*works: Callable[[], Any]) -> list[Any]:
    """What forked processes answer; None of one that was killed."""
    children = []
    for work in works:
        readable, writable = os.pipe()
        if not (child := os.fork()):
            code = 1
            try:
                os.write(writable, json.dumps(work()).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writable)
        children.append((child, readable))
    answers = []
    for child, readable in children:
        with open(readable) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        answers.append(json.loads(text) if text else None)
    return answers


def die_compiling(started: Path) -> None:
    """From now on, compiling says so and is killed a little later."""

    def make_ir(*_: Any, **__: Any) -> None:
        started.touch()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    ASTSource.make_ir = make_ir  # type: ignore[method-assign]


def stop_compiling(stopped: Path) -> None:
    """From now on, compiling takes long."""
    make_ir = ASTSource.make_ir

    def much_later(*given: Any, **more: Any) -> Any:
        stopped.touch()
        time.sleep(3.0)
        return make_ir(*given, **more)

    ASTSource.make_ir = much_later  # type: ignore[method-assign]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def no_locks() -> None:
    """A file system that knows none."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    compile_once.fcntl.flock = flock  # type: ignore[union-attr]


def ranks(folder: Path) -> dict[str, list[Any]]:
    """Processes together, in several situations."""
    precompile.kernels(call_of("sm_80", True, **small()))  # Triton's hash of itself, which takes seconds
    found = {}

    def case(name: str, *works: Callable[[], Any], cache: Path | None = None) -> None:
        knobs.cache.dir = str(cache or folder / name)
        found[name] = together(*works)

    case("warmed", attend)
    case("together", *[rank] * 8)
    case("again", *[rank] * 2, cache=folder / "together")
    started = folder / "started"
    case("killed", lambda: rank(lambda: die_compiling(started)), *[lambda: rank(lambda: wait_for(started))] * 3)
    (folder / "file").touch()
    case("unwritable", *[rank] * 2, cache=folder / "file" / "cache")
    case("no locks", *[lambda: rank(no_locks)] * 2)
    compile_once.LOCK_TIMEOUT, stopped = 0.2, folder / "stopped"
    case("stuck", lambda: rank(lambda: stop_compiling(stopped)), lambda: rank(lambda: wait_for(stopped)))
    return found


if __name__ == "__main__":
    driver.set_active(Pretended(gpu_target("sm_90" if sys.argv[1] == "keys" else "sm_80")))  # type: ignore[arg-type]
    print(json.dumps(keys() if sys.argv[1] == "keys" else ranks(Path(sys.argv[2]))))
