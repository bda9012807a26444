"""Explain which back end would run a call, with which tiles, and why others refuse."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..call.backend import BACKWARD, FORWARD, candidates, planned, refusals, select
from ..call.check import check_arguments, describe, describe_fake
from ..call.operands import Operands
from ..call.options import Everything, spell_out
from ..call.problem import Problem, matmul_setting, target_of
from ..call.recipe import Recipe
from ..quantize.codes import empty_codes
from ..values.quantized import Quantized, describe_conversion
from .api import SIGNATURE, with_defaults

SLOWER, LATER = "measured slower here", "{} is asked first"
"""Why a back end that can run a call does not."""


@dataclass(frozen=True)
class Explanation:
    """Which back end would run a call, with which tiles, and why others refuse. It prints as a table.

    `backend` is None if every back end refuses. `refusals` holds the reasons against each one. `backward` is another
    name than `backend` where gradients are faster on that one; `backward_tiles` are its tiles. `asked` is the one that
    the call names.
    """

    backend: str | None
    tiles: str
    refusals: dict[str, list[str]]
    backward: str | None = None
    backward_tiles: str = ""
    asked: str | None = None

    def __str__(self) -> str:
        lines, first = [f"{'back end':<10}{'verdict'}"], True
        for name, reasons in self.refusals.items():
            if name == self.backend == self.backward:
                lines.append(f"{name:<10}runs this: {self.tiles}")
            elif name == self.backend:
                lines.append(f"{name:<10}runs the forward: {self.tiles}")
            elif name == self.backward:
                lines.append(f"{name:<10}runs the backward: {self.backward_tiles}")
            elif reasons:
                lines.append(f"{name:<10}refuses: " + f"\n{'':<10}         ".join(reasons))
            else:
                why = f"backend={self.asked!r} asks for another" if self.asked else SLOWER if first else LATER
                why = why.format(self.backend)
                lines.append(f"{name:<10}can run it; {why}")
            first = first and name != self.backend
        return "\n".join(lines)


def explain(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    device: str | None = None,
    **options: Unpack[Everything],
) -> Explanation:
    """Explain which kernels `attention` would run for these arguments, without running them.

    Args:
        q, k, v, options: as for `attention`; the tensors may be on the meta device.
        device: None means q's device; "cpu", "sm_90", "gfx942", … name a chip that this machine need not have.

    Returns:
        An Explanation with .backend (None if all refuse), .tiles, .refusals, .backward and .backward_tiles. Print it to
        see a table.

    Raises:
        TypeError, ValueError: as for `attention`.
    """
    chosen = {
        name: value for name, value in with_defaults("explain", options).items() if name not in ("seed", "return_lse")
    }
    x, recipe, longest = check_arguments(q, k, v, **chosen)
    problem = problem_on(x, recipe, longest, device)
    against = refusals(problem)
    if all(against[name] for name in candidates(problem)):
        return Explanation(None, "", against)
    of_backward = problem.products.for_backward(problem)
    one = other = select(problem, FORWARD).name
    first, second = planned(problem, FORWARD).describe(), ()
    if not (problem.layout.no_gradients or problem.products.no_gradients):
        other, second = select(of_backward, BACKWARD).name, planned(of_backward, BACKWARD).describe()
    if one == other:  # what holds for both passes comes last
        first = second = *(phrase for phrase in first if phrase not in second), *second
    tiles = *first, *approximate(problem), *describe_conversion(q, x[:3])
    return Explanation(one, "; ".join(tiles), against, other, "; ".join(second), recipe.backend)


spell_out(explain, SIGNATURE)


def approximate(p: Problem) -> list[str]:
    """Say what products that are not exact mean for accuracy and speed, and what a pass in front writes for them."""
    said = p.products.describe(p)
    if not said:
        return []
    count = sum(t.nbytes for t in empty_codes(p, torch.device("meta")).present())
    return [*said, f"{count} bytes of codes and scales"]


def problem_on(x: Operands, recipe: Recipe, longest: tuple[int, int], device: str | None) -> Problem:
    """Return the checked Problem on a device, or on a chip that this machine need not have."""
    matmul = matmul_setting() if x.q.dtype == torch.float32 and not recipe.precision else None
    target = device or target_of(x.q.device)
    if target == "meta":
        raise ValueError(
            "explain: device must name a chip for tensors on the meta device, got None; "
            'pass device="cpu", "sm_90", "gfx942", …'
        )
    addressed = all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta for t in (*x[:3], *x.extra))
    return (describe if addressed else describe_fake)(x, recipe, longest)._replace(target=target, matmul=matmul)
