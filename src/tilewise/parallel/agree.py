"""Agreement: ranks compare a call before any of them sends, so that an error of one is an error of all, at once."""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..call.dispatch import NAMESPACE, OPERATORS
from ..call.recipe import KINDS
from ..values.masks import Full, Mask, intersect
from .exchange import Axes, alike, gathered, home_of, size_of
from .held import Numbers, checked

T = TypeVar("T")
Facts = dict[str, str]
"""A call as text: all that its messages depend on, forward and backward, by name."""
ERROR = "error"
"""What a rank says that has an error of its own."""
SHOWN = 300
"""Letters of a fact that an error shows."""


def together(axes: Axes, near: Any, prepare: Callable[[], tuple[Facts, T]]) -> T:
    """Return what `prepare` returns beside its facts, once every rank has said the same facts.

    Every rank of the groups calls it in every call, before it sends anything else. If facts differ, ValueError is
    raised on every rank. If one rank cannot prepare, it raises its own error and the others a ValueError. While a CUDA
    graph is captured nothing can be read, and nothing is compared.

    near: a tensor of the call.
    """
    home = home_of(axes, near)
    if size_of(axes) == 1 or (home.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return prepare()[1]
    try:
        facts, found = prepare()
    except Exception as error:
        if not alike(ERROR, axes, home):
            gathered(f"{type(error).__name__}: {error}", axes)
        raise
    if not alike(repr(facts), axes, home):
        _disagree(gathered(facts, axes))
    return found


def _disagree(heard: list[Any]) -> None:
    """Raise for what every rank has said, its facts or its error."""
    for rank, said in enumerate(heard):
        if isinstance(said, str):
            raise ValueError(
                f"a call must be possible on every rank, got {said} on rank {rank}; pass what fits there, too"
            )
    names = dict.fromkeys(name for one in heard for name in one)
    name = next(name for name in names if len({one.get(name) for one in heard}) > 1)
    texts = dict.fromkeys(str(one.get(name)) for one in heard)
    each = " and ".join(text if len(text) <= SHOWN else f"{text[:SHOWN]} ..." for text in texts)
    raise ValueError(f"{name} must be alike on every rank, got {each}; pass the same to all")


def of_numbers(numbers: Numbers | None) -> Facts:
    """Return what ranks say of a mask's numbers, where they were read."""
    return {} if numbers is None else {"the numbers of the mask": str([one.numbers for one in numbers])}


FULL = Full()


def agreed(x: Tensor, axes: Axes, facts: Facts, mask: Mask = FULL, N: int = 0, needed: bool = False) -> Tensor:
    """Return x, once every rank has said the same facts of a call. Graphs hold it as an operator, and so it runs in
    every call of a compiled function.

    mask, N, needed: whose numbers are facts, too, as `checked` wants them.
    """
    if size_of(axes) == 1:
        return x
    whole = [part for part in mask.parts if not part.broadcasts]
    tensors = [t for part in whole for t in part.tensors]
    return OPERATORS.agree(x, tensors, written(axes, facts, [part.plain for part in whole], N, needed))


def written(axes: Axes, *rest: Any) -> str:
    """Write as text what the operator cannot take: the groups' names, and the rest."""
    groups: list[Any] = [dist.group.WORLD if axis is None else axis for axis in axes]
    return repr(([group.group_name for group in groups], *rest))


written._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result: the text is written while a call is traced."""
literal: Any = lru_cache(256)(ast.literal_eval)


def read(text: str) -> tuple[Any, ...]:
    """Return what `written` wrote: the groups of these names, and the rest."""
    names, *rest = literal(text)
    return tuple(map(distributed_c10d._resolve_process_group, names)), *rest  # type: ignore[attr-defined]


def rebuilt(plain: Iterable[tuple[Any, ...]], tensors: Iterator[Tensor]) -> tuple[Any, ...]:
    """Return masks or scores of these numbers with the next of the tensors."""
    kinds = [(KINDS[name], numbers) for name, *numbers in plain]
    return tuple([kind.rebuild(tuple(numbers), tuple(next(tensors) for _ in kind.captures)) for kind, numbers in kinds])


@torch.library.custom_op(f"{NAMESPACE}::agree", mutates_args=())
def agree_op(x: Tensor, captured: Sequence[Tensor], where: str) -> Tensor:
    """Return x, once every rank of some groups says the same. `where` is encoded text."""
    axes, facts, parts, N, needed = read(where)
    mask = intersect(rebuilt(parts, iter(captured)))
    together(axes, x, lambda: (facts | of_numbers(checked(mask, N, needed, x)), None))
    return x.clone()


@agree_op.register_fake
def _(x: Tensor, captured: Sequence[Tensor], where: str) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.count = len(inputs[1])


def _pass(ctx: Any, grad: Tensor) -> Any:
    return grad, [None] * ctx.count, None


agree_op.register_autograd(_pass, setup_context=_setup)
