"""Choice of a back end: the protocol, the ordered registry, and the reasons when one refuses a call."""

import importlib
from functools import cache, lru_cache
from typing import Protocol

from torch import Tensor

from ..values.tables import TileList
from ..values.value import Unsupported
from .operands import Codes, Grads, Operands, Saved
from .problem import Problem
from .shortcuts import quick_sources

PACKAGE = str(__package__).rpartition(".")[0]
ORDER = ("hopper", "triton", "cpu")
"""The first that accepts a problem runs it."""
ON_TRITON = ("hopper", "triton")
OLDEST_TRITON = 3, 6


class Backend(Protocol):
    """Every back end has these methods. Its package's module `backend` holds one instance, of the same name."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Return the reasons against running the problem; empty if it can. Allocate nothing, and run nothing."""
        ...

    def slower(self, problem: Problem, backward: bool) -> bool:
        """Tell whether the next back end that takes the problem is measured to be faster in one of its two passes."""
        ...

    def tiles(self, problem: Problem) -> str:
        """Describe the tiles and kernels that the problem would use, as text."""
        ...

    def list_tiles(self, problem: Problem, x: Operands, gradients: bool) -> tuple[TileList, ...]:
        """List the mask's tiles for the forward, with `gradients` also for the backward; () if these read no lists.

        They are on q's device. k and v of x may be on the meta device.
        """
        ...

    def codes(self, problem: Problem, x: Operands) -> Codes:
        """Quantize q, k and v of a call with 8-bit products, as its forward does."""
        ...

    def forward(self, problem: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """Compute o and lse as new tensors; also return tensors saved for this back end's backward.

        With 8-bit products these are the Codes, from which gradients.py makes the call of a 16-bit backward.
        """
        ...

    def backward(self, problem: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        """Return the gradients of sum(o * do) + sum(lse * dlse), with those of the extras in problem.wanted.

        do or dlse may be None.
        """
        ...


class OldTriton(ImportError):  # noqa: N818, the name says what is installed
    """The installed Triton is too old to compile the kernels."""


class Missing:
    """It replaces a back end whose requirements are not installed, and refuses every problem."""

    def __init__(self, name: str, error: ImportError) -> None:
        self.name, self.error = name, error

    def why_not(self, problem: Problem) -> list[str]:
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
            check_triton()
            with quick_sources():
                return importlib.import_module(f"{PACKAGE}.{name}.backend").backend
        return importlib.import_module(f"{PACKAGE}.{name}.backend").backend
    except ImportError as error:
        return Missing(name, error)  # type: ignore[return-value]  # refuses everything, so nothing else is called


def candidates(problem: Problem) -> tuple[str, ...]:
    """Return the back ends to ask, in order. For CPU tensors it is "cpu" alone, so that no kernel is imported."""
    asked = problem.recipe.backend
    return (asked,) if asked else ("cpu",) if problem.target == "cpu" else ORDER


def refusals(problem: Problem) -> dict[str, list[str]]:
    """Return every back end's reasons against the problem, in order of preference."""
    return {name: load(name).why_not(problem) for name in ORDER}


@lru_cache(4096)
def select(problem: Problem, backward: bool = False) -> Backend:
    """Return the requested back end, or the first that accepts the problem and is not slower, for one of two passes.

    Every back end's backward takes what another one's forward saved. Raise Unsupported with the reasons of the
    requested one, or of all.
    """
    able = (load(name) for name in candidates(problem) if not load(name).why_not(problem))
    first = next(able, None)
    if first is not None:
        return next(able, first) if not problem.recipe.backend and first.slower(problem, backward) else first
    asked = problem.recipe.backend
    remedy = "leave backend out to have one chosen" if asked else "change the argument named, or move the tensors"
    lines = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in refusals(problem).items() if asked in (None, name))
    raise Unsupported(f"no back end takes this call; {remedy}\n{lines}")
