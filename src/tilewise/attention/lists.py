"""List a mask's tiles once, for every call of attention that has this mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..call.backend import FORWARD, ON_TRITON, Pass, planned
from ..call.check import check_arguments
from ..call.dispatch import PLAIN, transformed
from ..call.import_hook import when_imported
from ..call.operands import Operands
from ..call.options import Unmasked, as_mask, spell_out
from ..call.problem import target_of
from ..call.recipe import Recipe
from ..values.listed import Listed, TileList
from ..values.masks import Mask
from ..values.value import Unsupported
from .api import SIGNATURE, with_defaults
from .explain import problem_on


def listed(
    mask: Mask | Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    device: torch.device | str | int | None = None,
    **options: Unpack[Unmasked],
) -> Mask:
    """List the tiles of a mask once, for all layers of a model and their backward.

    On a GPU, Documents, Dense, Padding of bools, and every mask combined with one, have their tiles listed in each
    call of `attention`, forward and backward. The result is the same mask with these lists, on which calls agree bit by
    bit. Masks whose tiles are intervals, and masks on the CPU, need no lists: they are returned as they are.

    Make it again when a tensor of the mask has changed. Call it outside torch.compile(fullgraph=True), and give the
    result to the compiled function.

    Args:
        mask: any Mask, or a function of (b, h, i, j). Combine masks before: `listed & other` has no lists.
        q, k, v, options: as for `attention`, as in the calls to come; their values are not read. They may be on the
            meta device: then shapes and types count, and strides are contiguous.
        device: where the calls will be. None: where the mask's tensors are, and for a mask without any, where q is.

    Returns:
        A Mask. Without gradients (torch.no_grad), its lists are those of the forward alone. `attention` raises
        ValueError for a listed mask if its lengths, or the tiles that its kernels read, are others.

    Raises:
        TypeError, ValueError, Unsupported: as `attention`; Unsupported also within torch.func's transforms, and for
            fake tensors.
    """
    mask = mask.mask if isinstance(mask, Listed) else as_mask(mask)
    chosen: dict[str, Any] = {**with_defaults("listed", options), "mask": mask}
    del chosen["seed"], chosen["return_lse"]
    x, recipe, longest = check_arguments(q, k, v, **chosen)
    if all([part.interval for part in mask.parts]):
        return mask
    of_mask = next((t.device for part in mask.parts for t in part.tensors), None)
    asked = (of_mask or x.q.device) if device is None else torch.empty(0, device=device).device
    if asked.type == "meta" or (of_mask is not None and asked != of_mask):
        where = "where the calls will be" if of_mask in (None, asked) else f"the mask's {of_mask}"
        raise ValueError(
            f"listed: device must be {where}, got {asked}; pass device='cuda', or move the mask by .to(...)"
        )
    if asked.type == "cpu" and recipe.backend not in ON_TRITON:
        return mask
    lists = _lists(x, recipe, longest, asked)
    return Listed(mask, lists) if lists else mask


def _lists(x: Operands, recipe: Recipe, longest: tuple[int, int], device: torch.device) -> tuple[TileList, ...]:
    """List the tiles that the chosen back end's kernels read."""
    if transformed() or not PLAIN.issuperset(map(type, (*x[:3], *x.extra))):
        raise Unsupported(
            "tiles cannot be listed for fake tensors, subclasses of Tensor, or within torch.func's transforms; "
            "call tilewise.listed before"
        )
    specs = x._replace(extra=tuple([t.to("meta") for t in x.extra])) if x.q.is_meta else x
    problem = problem_on(specs, recipe, longest, target_of(device))
    problem = problem._replace(q=problem.q._replace(device=device))  # on which tables and grids depend
    x = x._replace(q=x.q.new_empty((), device=device).expand(x.q.shape))
    passes = Pass if torch.is_grad_enabled() else (FORWARD,)
    made = {(one.by_key, one.B_r, one.B_c): one for which in passes for one in planned(problem, which).lists(x)}
    return tuple(made.values())


def _leave_graphs(dynamo: Any) -> None:
    """Break graphs before `_lists`: a graph cannot know the sizes of the tiles, and so the shapes of the lists."""
    global _lists  # noqa: PLW0603, nothing else names it in a graph
    _lists = dynamo.disable(
        _lists, reason="call tilewise.listed outside of it, and give its result to the compiled function"
    )


when_imported("torch._dynamo", _leave_graphs)

spell_out(listed, SIGNATURE)
