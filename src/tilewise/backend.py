"""Back ends: the protocol, the ordered registry, and the choice with every refusal's reasons."""

import importlib
from functools import cache, lru_cache
from typing import Protocol

from torch import Tensor

from .problem import Grads, Operands, Problem, Saved, Unsupported

ORDER = ("hopper", "triton", "cpu")
"""The first with nothing against a problem runs it."""
ON_TRITON = ("hopper", "triton")
OLDEST_TRITON = 3, 6


class Backend(Protocol):
    """What a back end is. Each folder's __init__ holds one as `backend`."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Reasons against; empty: can run. Pure: no allocation, no device work."""
        ...

    def tiles(self, problem: Problem) -> str:
        """The tiles and kernels it would use, for people."""
        ...

    def forward(self, problem: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """o and lse, freshly written, and what a backward of this back end is glad to find."""
        ...

    def backward(self, problem: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        """Gradients of sum(o * do) + sum(lse * dlse); either may be None. Extras in problem.wanted get theirs."""
        ...


class OldTriton(ImportError):  # noqa: N818, it says what is here
    """The installed Triton cannot compile the kernels."""


class Missing:
    """Stands in for a back end whose requirements are not installed."""

    def __init__(self, name: str, error: ImportError) -> None:
        self.name, self.error = name, error

    def why_not(self, problem: Problem) -> list[str]:
        return [needs(self.error)]


def needs(error: ImportError) -> str:
    """What stands against kernels that cannot be imported."""
    if isinstance(error, OldTriton):
        return str(error)
    return f"it needs a package that cannot be imported ({error}); pip install 'tilewise[triton]'"


def check_triton() -> None:
    """ImportError unless there is a Triton that compiles the kernels: asked before they are imported."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        least = ".".join(map(str, OLDEST_TRITON))
        raise OldTriton(
            f"it needs Triton {least} or newer, here is {triton.__version__}; install torch 2.10 or newer, which "
            "brings one"
        )


@cache
def load(name: str) -> Backend:
    """The back end of that name, imported on first use."""
    try:
        if name in ON_TRITON:
            check_triton()
        return importlib.import_module(f"{__package__}.{name}").backend
    except ImportError as error:
        return Missing(name, error)  # type: ignore[return-value]  # refuses everything, so nothing else is called


def candidates(problem: Problem) -> tuple[str, ...]:
    """Which back ends to ask, in order. On CPU tensors the others refuse unless asked for, so nobody imports them."""
    asked = problem.recipe.backend
    return (asked,) if asked else ("cpu",) if problem.target == "cpu" else ORDER


def refusals(problem: Problem) -> dict[str, list[str]]:
    """Every back end with its reasons against the problem, in order of preference."""
    return {name: load(name).why_not(problem) for name in ORDER}


@lru_cache(4096)
def select(problem: Problem) -> Backend:
    """The back end asked for, or the first with nothing against the problem.

    Raises Unsupported with the reasons: of the one that was asked for, or of all.
    """
    for name in candidates(problem):
        if not load(name).why_not(problem):
            return load(name)
    asked = problem.recipe.backend
    remedy = "leave backend out to have one chosen" if asked else "change the argument named, or move the tensors"
    lines = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in refusals(problem).items() if asked in (None, name))
    raise Unsupported(f"no back end takes this call; {remedy}\n{lines}")
