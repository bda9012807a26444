"""Ahead-of-time compilation: warm() compiles kernels into Triton's cache, also for a GPU that is not installed."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack  # in typing from Python 3.11 on; PyTorch brings it

from ..attention.api import SIGNATURE, with_defaults
from ..attention.explain import problem_on
from ..call.backend import select
from ..call.check import check_arguments
from ..call.options import Everything, spell_out
from ..call.problem import Problem, TensorSpec, target_of
from ..call.recipe import Recipe
from ..host.bundle import NO_LINES
from ..values.listed import Listed

Watch = Callable[[int, int, str], Any]
"""A progress callback: it gets the number of kernels done, their total, and the last one's name."""
META = torch.device("meta")
WORKER = """
import sys
name, file, target, *sys.path = sys.argv[1:]
import importlib.util
spec = importlib.util.spec_from_file_location(name, file)
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(f"{name}.warm.precompile").main(target)
"""
"""What a process that compiles runs. It imports this package from its files: `kernels` loads it under another name.

It finds other modules where this process does, but not in the current folder, where Python would look first."""


class Kernel(NamedTuple):
    """A kernel that the given calls need."""

    name: str
    hash: str
    """Triton's cache key of the kernel, a hash of all that the compiler reads."""
    found: bool
    """Whether the cache had it before."""
    seconds: float | None = None
    """Compilation time; None if the cache had the kernel, or another process was faster."""


@dataclass(frozen=True)
class Warmed:
    """Hold the kernels that `warm` compiled, and what it could not foresee. It prints as a table."""

    kernels: tuple[Kernel, ...]
    unforeseen: dict[str, tuple[str, ...]]
    """What may differ in later calls, and which kernels such a call would still compile."""

    def __str__(self) -> str:
        if not self.kernels:
            return "nothing to compile: no kernel of Triton's runs these calls"
        width = 2 + max(len(kernel.name) for kernel in self.kernels)
        lines = [f"{'kernel':<{width}}outcome"]
        for kernel in self.kernels:
            compiled = "found" if kernel.seconds is None else f"compiled in {kernel.seconds:.1f} s"
            lines.append(f"{kernel.name:<{width}}{compiled}")
        if self.unforeseen:
            lines += ["", f"{'not foreseen':<44}what its first call compiles"]
            lines += [f"{what:<44}{', '.join(names)}" for what, names in self.unforeseen.items()]
        return "\n".join(lines)


class Call(NamedTuple):
    """A call without its tensors, as we send it to a process that compiles."""

    problem: Problem
    wanted: tuple[bool, ...] | None
    """Which extra operands want a gradient; None if there is no backward."""
    lse: bool = False
    """Whether lse may have a gradient."""
    aligned: bool = True
    """Whether the gradient of o starts on a 16-byte boundary."""

    def __str__(self) -> str:
        p, plain = self.problem, Recipe()._asdict()
        shapes = ", ".join(f"{name} {tuple(spec.shape)}" for name, spec in zip("qkv", p[1:4], strict=True))
        options = {name: value for name, value in p.recipe._asdict().items() if value != plain[name]}
        return f"{shapes} in {p.q.dtype}, {options}, {'without' if self.wanted is None else 'with'} gradients"

    def others(self) -> Iterator[tuple[str, "Call"]]:
        """Yield calls that differ from this one in what `warm` cannot know, each with a name of the difference."""
        p = self.problem
        for M, N in ((p.M + 1, p.N + 1), (p.M + 16, p.N + 16), (2 * p.M, 2 * p.N), (4 * p.M, 4 * p.N)):
            yield "other lengths", self._replace(problem=_resized(p, p.B, M, N))
        for B in (1, p.B + 1, 2 * p.B):
            yield "another batch size", self._replace(problem=_resized(p, B, p.M, p.N))
        parts = [_strided(spec, 3) for spec in (p.q, p.k, p.v)]
        yield "q, k and v as parts of one tensor", self._replace(problem=p._replace(q=parts[0], k=parts[1], v=parts[2]))
        unaligned = p.q._replace(aligned=False)
        yield "q, k or v off a 16-byte boundary", self._replace(problem=p._replace(q=unaligned))
        if self.wanted is not None:
            yield "a gradient of o off a 16-byte boundary", self._replace(aligned=False)
            yield "a gradient of lse (return_lse)", self._replace(lse=True)


def _resized(p: Problem, B: int, M: int, N: int) -> Problem:
    """Return the problem with other sizes and contiguous tensors. Packed sequences also change their total of rows."""
    of_q, of_k, own = p.layout.resized(p, B, M, N)
    q, k, v = (_shaped(s, (*of, *s.shape[-2:])) for s, of in zip(p[1:4], (of_q, of_k, of_k), strict=True))
    rest = p.extra[: len(p.extra) - len(own)]
    ends = [_shaped(spec, shape) for spec, shape in zip(p.extra[len(rest) :], own, strict=True)]
    made = p._replace(q=q, k=k, v=v, max_q=M, max_k=N, extra=(*rest, *ends))
    extra = list(made.extra)
    for at, whole in enumerate(shape for kind in p.kinds for shape in kind.whole_shapes(made)):
        pairs = zip(extra[at].shape, whole[len(whole) - len(extra[at].shape) :], strict=True)
        extra[at] = _shaped(extra[at], tuple(1 if size == 1 else new for size, new in pairs))
    return made._replace(extra=tuple(extra))


def _shaped(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a contiguous tensor of another shape."""
    return spec._replace(shape=shape, stride=torch.empty(shape, device=META).stride())


def _strided(spec: TensorSpec, times: int) -> TensorSpec:
    """Return the spec with all but the last two strides multiplied by `times`, as in a view of a larger tensor."""
    *outer, head, entry = spec.stride
    return spec._replace(stride=(*(times * stride for stride in outer), head, entry))


def warm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    device: str | None = None,
    backward: bool = True,
    more: Sequence[Mapping[str, Any]] = (),
    processes: int | None = None,
    **options: Unpack[Everything],
) -> Warmed:
    """Compile the kernels that `attention` and its gradient use for these arguments, into Triton's cache.

    The first such call then finds them there, in this process and in any later one with the same TRITON_CACHE_DIR, GPU,
    Triton and tilewise. No attention is computed. Subprocesses compile, not this one.

    Args:
        q, k, v, options: as for `attention`; the tensors may be on the meta device. With return_lse, it also compiles
            for a gradient of lse. A bias gets a gradient only if the tensor in Bias requires one.
        device: None means q's device, or this machine's GPU for meta tensors. "sm_90", "gfx942", … name a chip that
            this machine need not have.
        backward: False leaves the kernels of the gradient out.
        more: further calls, each given as a mapping of the arguments that differ.
        processes: how many subprocesses compile at once. None means one per core, but at most one per kernel.

    Returns:
        A Warmed with .kernels and .unforeseen. Print it to see a table.

    Raises:
        TypeError, ValueError, Unsupported: as for `attention`.
        RuntimeError: a kernel does not compile, or the cache is not writable.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be None or at least 1, got {processes}; leave it out for one per core")
    given = {"q": q, "k": k, "v": v, **options}
    return warm_calls([call_of(device, backward, **(given | dict(other))) for other in ({}, *more)], processes)


spell_out(warm, SIGNATURE)


def call_of(device: str | None, backward: bool, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    """Check the arguments, and return them as a Call."""
    chosen = with_defaults("warm", options)
    lse = chosen.pop("return_lse")
    chosen.pop("seed")
    if isinstance(chosen["mask"], Listed):  # its lists have one length; the kernels are the same
        chosen["mask"] = chosen["mask"].mask
    x, recipe, longest = check_arguments(q, k, v, **chosen)
    here = x.q.device
    if not x.q.is_cuda:
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else META
    if device is None and x.q.is_meta:
        if here == META:
            raise ValueError(
                'warm: device must name a chip where PyTorch sees no GPU, got None; pass device="sm_90", "gfx942", …'
            )
        device = target_of(here)
    problem = problem_on(x, recipe, longest, device)
    card = here if target_of(here) == problem.target else META  # which has a processor count and tile sizes
    q_, k_, v_, *extra = (spec._replace(device=card) for spec in (*problem[1:4], *problem.extra))
    wanted = tuple(t.requires_grad for t in x.extra) if backward else None
    return Call(problem._replace(q=q_, k=k_, v=v_, extra=tuple(extra)), wanted, bool(lse))


def warm_calls(
    calls: Sequence[Call],
    processes: int | None = None,
    watch: Watch = lambda *_: None,
    files: dict[str, bytes] | None = None,
) -> Warmed:
    """Compile the kernels of calls for one GPU, each kernel only once, in parallel processes.

    Given a dict for `files`, compile without the lines of the source, and put the kernels' files into it (`save`).
    """
    calls = [call for call in calls if select(call.problem).name != "cpu" and call.problem.target != "cpu"]
    if not calls:
        return Warmed((), {})
    with Workers(calls[0].problem.target, {} if files is None else {NO_LINES: "1"}) as workers:
        needed: dict[str, tuple[Call, Kernel]] = {}
        others: list[tuple[str, dict[str, str]]] = []
        for call in calls:
            kernels, elsewhere = workers.ask("list_kernels", call)
            needed |= {kernel.hash: (call, kernel) for kernel in kernels if kernel.hash not in needed}
            others += elsewhere.items()
        unforeseen: dict[str, tuple[str, ...]] = {}
        for what, kernels in others:
            if names := {name for hash, name in kernels.items() if hash not in needed}:
                unforeseen[what] = tuple(sorted(names.union(unforeseen.get(what, ()))))
        warmed = Warmed(tuple(_compiled(needed, workers, processes, watch)), unforeseen)
        if files is not None:
            for hash, (call, _) in needed.items():
                files |= workers.ask("pack", call, hash)
        return warmed


def _compiled(
    needed: Mapping[str, tuple[Call, Kernel]], workers: "Workers", processes: int | None, watch: Watch
) -> list[Kernel]:
    """Compile the kernels that the cache lacks; return all, with the seconds that these took."""
    missing = [item for item in needed.values() if not item[1].found]
    done, failures = {hash: kernel for hash, (_, kernel) in needed.items()}, []
    pool = ThreadPoolExecutor(processes or min(os.cpu_count() or 1, max(1, len(missing))))
    try:
        tasks = {pool.submit(workers.ask, "compile", call, kernel.hash): kernel for call, kernel in missing}
        for count, task in enumerate(as_completed(tasks), 1):
            kernel = tasks[task]
            try:
                done[kernel.hash] = kernel._replace(seconds=task.result())
            except RuntimeError as error:
                failures.append(f"{kernel.name}: {error}")
            watch(count, len(missing), kernel.name)
    except BaseException:  # such as an interrupt: do not wait for the processes
        workers.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        first = f"warm: {len(failures)} of {len(missing)} kernels did not compile; change these calls, or report them"
        raise RuntimeError("\n".join([first, *failures]))
    return list(done.values())


class Workers(AbstractContextManager["Workers"]):
    """A pool of processes that compile for a GPU; a request starts a process if none is idle."""

    def __init__(self, target: str, variables: Mapping[str, str] | None = None) -> None:
        self.target, self.variables = target, {"TRITON_INTERPRET": "0", **(variables or {})}
        self.idle: list[subprocess.Popen[bytes]] = []
        self.all: list[subprocess.Popen[bytes]] = []

    def ask(self, *request: Any) -> Any:
        """Send a request to one process and return its answer. Raise RuntimeError if it fails or exits."""
        process = self.idle.pop() if self.idle else self._start()
        try:
            pickle.dump((request[0], request[1:]), process.stdin)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            good, answer = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RuntimeError(
                f"the process that compiled it ended with exit status {process.wait()}; "
                "pass processes=1 if memory ran out"
            ) from None
        self.idle.append(process)
        if not good:
            raise RuntimeError(answer)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        environment, here = os.environ | self.variables, os.getcwd()
        package = str(Path(__file__).parents[1] / "__init__.py")
        path = [folder for folder in sys.path if os.path.realpath(folder) != here]
        command = [sys.executable, "-c", WORKER, str(__package__).rpartition(".")[0], package, self.target, *path]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.all.append(process)
        return process

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes."""
        for process in self.all:
            process.kill()
            process.communicate()
