"""Choice of a back end: the protocol, the ordered registry, and the reasons when one refuses a call."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..values.listed import TileList
from ..values.value import Unsupported
from .operands import Operands, Saved
from .problem import Problem, once
from .shortcuts import quick_sources

PACKAGE = str(__package__).rpartition(".")[0]
ORDER = ("hopper", "triton", "cpu")
"""The first that accepts a problem runs it."""
ON_TRITON = ("hopper", "triton")
OLDEST_TRITON = 3, 6


class Pass(Enum):
    """What is computed of a call."""

    FORWARD = "forward"
    BACKWARD = "backward"


FORWARD, BACKWARD = Pass


def _no_lists(x: Operands) -> tuple[TileList, ...]:
    return ()


def never(*given: Any) -> None:
    """Return None: nothing repeats a call."""


class Plan(NamedTuple):
    """How a back end runs one pass of a problem."""

    run: Callable[..., Any]
    """Computes a pass. A forward takes x and the seed, and returns new tensors as Saved, also those that its back end's
    backward wants, or the codes of 8-bit products; it writes into a Saved that is given third. A backward takes x,
    Saved, do and dlse, of which one may be None, and returns Grads of sum(o * do) + sum(lse * dlse), with those of the
    extras in problem.wanted."""
    describe: Callable[[], tuple[str, ...]]
    """Says which kernels run with which tiles, in a few phrases; those that both passes have come last."""
    lists: Callable[[Operands], tuple[TileList, ...]] = _no_lists
    """Lists the mask's tiles on q's device, where the kernels read lists; k and v may be on the meta device."""
    repeat: Callable[..., Any] = never
    """Takes what `run` took, and returns what repeats its launches by addresses alone, or None (host/repeat.py)."""
    rest: Problem | None = None
    """What the plan leaves: the same call for other sequences, whose plan writes into the same results."""
    ahead: Callable[[tuple[bool, ...]], Any] = never
    """Starts to compile the kernels of a forward's gradient. It takes which extras want one."""


COMPILING: ContextVar[Callable[[], Any] | None] = ContextVar("compiling", default=None)
"""What to do once a call's kernel must be compiled, while it compiles."""


@contextmanager
def while_compiling(start: Callable[[], Any]) -> Iterator[None]:
    """Let the first compilation of what runs in this context call `start` as it begins; without one, it never is."""
    token = COMPILING.set(start)
    try:
        yield
    finally:
        COMPILING.reset(token)


class Backend(Protocol):
    """Every back end has these five members. Its package's module `backend` holds one instance, of the same name."""

    name: str

    def takes(self, problem: Problem) -> Mapping[Any, str]:
        """Return which of `NEEDS` it meets: each with the reason against it in such a problem, or "" for none."""
        ...

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        """Return other reasons against running the problem; empty if it can. Allocate nothing, and run nothing."""
        ...

    def slower(self, problem: Problem, which: Pass) -> bool:
        """Tell whether the next back end that takes the problem is measured to be faster in a pass."""
        ...

    def plan(self, problem: Problem, which: Pass) -> Plan:
        """Return how it runs a pass of a problem that it takes."""
        ...


NEEDS = {
    "packed": "it takes no packed sequences",
    "cache": "it reads no cache",
    "pages": "it reads no pages",
    "starts in pages": "it reads pages from their first row, not from starts",
    "index": "it reads no index of a cache",
    "invariant": "it does not sum keys in pieces, as invariant asks",
    "8-bit keys": "it reads caches in q's type",
    "few queries": "it does not leave out a pack's sequences of many queries",
    torch.int8: "it multiplies no int8",
    torch.float8_e4m3fn: "it multiplies no e4m3",
}
"""What a call may need of a back end, and why one that does not name it refuses the call."""


class OldTriton(ImportError):  # noqa: N818, the name says what is installed
    """The installed Triton is too old to compile the kernels."""


class Missing:
    """It replaces a back end whose requirements are not installed, and refuses every problem."""

    def __init__(self, name: str, error: ImportError) -> None:
        self.name, self.error = name, error

    def takes(self, problem: Problem) -> Mapping[Any, str]:
        return dict.fromkeys(NEEDS, "")

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        return [needs(self.error)]


def needs(error: ImportError) -> str:
    """Return the reason why kernels cannot be imported."""
    if isinstance(error, OldTriton):
        return str(error)
    return f"it needs a package that cannot be imported ({error}); pip install 'tilewise[triton]'"


def check_triton() -> None:
    """Raise ImportError unless the installed Triton can compile the kernels. Call this before importing them."""
    import triton

    if not hasattr(triton, "__version__"):  # Python imports any folder of that name as an empty package
        raise ImportError(f"{next(iter(triton.__path__))} is a folder without code; rename it or leave it off sys.path")
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        least = ".".join(map(str, OLDEST_TRITON))
        raise OldTriton(
            f"Triton must be {least} or newer, got {triton.__version__}; install torch 2.10 or newer, which brings one"
        )


@cache
def load(name: str) -> Backend:
    """Return the back end of that name, imported on first use."""
    try:
        if name in ON_TRITON:
            return import_kernels(f"{name}.backend").backend
        return importlib.import_module(f"{PACKAGE}.{name}.backend").backend
    except ImportError as error:
        return Missing(name, error)  # type: ignore[return-value]  # refuses everything, so nothing else is called


@cache
def launch_module(operation: str) -> Any:
    """Return an operation's module `launch`, imported on first use; None without a Triton that compiles its kernel."""
    with suppress(ImportError):
        return import_kernels(f"{operation}.launch")
    return None


def import_kernels(module: str) -> Any:
    """Import a module with kernels. Raise ImportError without a Triton that compiles them."""
    check_triton()
    with quick_sources():
        return importlib.import_module(f"{PACKAGE}.{module}")


def candidates(problem: Problem) -> tuple[str, ...]:
    """Return the back ends to ask, in order. For CPU tensors it is "cpu" alone, so that no kernel is imported."""
    asked = problem.recipe.backend
    return (asked,) if asked else ("cpu",) if problem.target == "cpu" else ORDER


def against(name: str, problem: Problem, which: Pass = FORWARD) -> list[str]:
    """Return a back end's reasons against a pass of a problem; empty if it can run it."""
    backend = load(name)
    takes, needs = backend.takes(problem), problem.needs
    lacking = [takes.get(need, NEEDS[need]) for need in sorted(needs, key=[*NEEDS].index)]
    return [*filter(None, lacking), *problem.products.against(problem), *backend.why_not(problem, which)]


def holding(reasons: Mapping[str, Any]) -> list[str]:
    """Return the reasons that hold."""
    return [why for why, holds in reasons.items() if holds]


def refusals(problem: Problem) -> dict[str, list[str]]:
    """Return every back end's reasons against the problem, in order of preference."""
    return {name: against(name, problem) for name in ORDER}


@once
def select(problem: Problem, which: Pass = FORWARD) -> Backend:
    """Return the requested back end, or the first that accepts the problem and is not slower in a pass.

    Every back end's backward takes what another one's forward saved. Raise Unsupported with the reasons of the
    requested one, or of all.
    """
    able = (load(name) for name in candidates(problem) if not against(name, problem, which))
    first = next(able, None)
    if first is not None:
        return next(able, first) if not problem.recipe.backend and first.slower(problem, which) else first
    asked = problem.recipe.backend
    remedy = "leave backend out to have one chosen" if asked else "change the argument named, or move the tensors"
    lines = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in refusals(problem).items() if asked in (None, name))
    raise Unsupported(f"no back end takes this call; {remedy}\n{lines}")


@once
def planned(problem: Problem, which: Pass) -> Plan:
    """Return how a pass of a problem runs: by one back end, or for some sequences by another."""
    plan = select(problem, which).plan(problem, which)
    if plan.rest is None:
        return plan
    rest = planned(plan.rest, which)

    def run(x: Operands, seed: Tensor | None) -> Saved:
        return rest.run(x, seed, plan.run(x, seed))

    return Plan(run, plan.describe, plan.lists, ahead=plan.ahead)
