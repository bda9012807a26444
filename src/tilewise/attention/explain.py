"""Explain which back end would run a call, with which tiles, why others refuse, and what functions became."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..call.backend import BACKWARD, FORWARD, candidates, planned, refusals, select
from ..call.check import check_arguments, describe, describe_fake
from ..call.operands import Operands
from ..call.options import Everything, as_mask, as_scores, spell_out
from ..call.problem import Problem, inside, matmul_setting, target_of
from ..call.recipe import Recipe
from ..host.bundle import described
from ..quantize.codes import empty_codes
from ..values.function import Function
from ..values.masks import Mask
from ..values.quantized import Quantized, describe_conversion
from ..values.score import Score
from .api import SIGNATURE, with_defaults

SLOWER, LATER = "measured slower here", "{} is asked first"
"""Why a back end that can run a call does not."""
CLASSES = {
    "A": "class A, one interval of keys a row, which gives the tiles",
    "B": "class B, arithmetic bounds what a tile shows",
    "C": "class C, only entries tell what a tile shows",
}
"""What the text of a mask says of its tiles."""
SIDE = 128
"""Rows and keys of the tiles that are counted."""
MOST_TILES, MOST_ENTRIES = 1 << 16, 1 << 24
"""The most that are counted, and the most of their entries that are evaluated."""


@dataclass(frozen=True)
class Explanation:
    """Which back end would run a call, with which tiles, and why others refuse. It prints as a table.

    `backend` is None if every back end refuses. `refusals` holds the reasons against each one. `backward` is another
    name than `backend` where gradients are faster on that one; `backward_tiles` are its tiles. `asked` is the one that
    the call names. `functions` says what masks and scores that are functions became, and which tiles the mask leaves.
    `bundles` names the files from which kernels are taken that Triton's cache lacks.
    """

    backend: str | None
    tiles: str
    refusals: dict[str, list[str]]
    backward: str | None = None
    backward_tiles: str = ""
    asked: str | None = None
    functions: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()

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
        return "\n".join([*lines, *self.functions, *(f"bundle    {text}" for text in self.bundles)])


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
        An Explanation with .backend (None if all refuse), .tiles, .refusals, .backward, .backward_tiles, .functions and
        .bundles. Print it to see a table.

    Raises:
        TypeError, ValueError: as for `attention`.
    """
    chosen = {
        name: value for name, value in with_defaults("explain", options).items() if name not in ("seed", "return_lse")
    }
    mask, scores = as_mask(chosen["mask"]), as_scores(chosen["score"])
    x, recipe, longest = check_arguments(q, k, v, **chosen | {"mask": mask, "score": scores})
    problem = problem_on(x, recipe, longest, device)
    against, functions = refusals(problem), became(mask, scores, problem)
    if all(against[name] for name in candidates(problem)):
        return Explanation(None, "", against, functions=functions)
    learned = tuple([t.requires_grad and torch.is_grad_enabled() for t in x.extra])
    of_backward = problem.products.for_backward(problem)._replace(wanted=learned)
    one = other = select(problem, FORWARD).name
    first, second = planned(problem, FORWARD).describe(), ()
    if not (problem.layout.no_gradients or problem.products.no_gradients):
        other, second = select(of_backward, BACKWARD).name, planned(of_backward, BACKWARD).describe()
    if one == other:  # what holds for both passes comes last
        first = second = *(phrase for phrase in first if phrase not in second), *second
    tiles = *first, *approximate(problem), *describe_conversion(q, x[:3])
    used = () if "cpu" == one == other else tuple(described())
    return Explanation(one, "; ".join(tiles), against, other, "; ".join(second), recipe.backend, functions, used)


spell_out(explain, SIGNATURE)


def became(mask: Mask, scores: Sequence[Score], p: Problem) -> tuple[str, ...]:
    """Say what masks and scores that are functions became, and which tiles the whole mask leaves."""
    masks = [part for part in mask.parts if isinstance(part, Function)]
    changes = [score for score in scores if isinstance(score, Function)]
    said = [f"{one.place}: {_of_mask(one)}" for one in masks] + [f"{one.place}: {_of_score(one)}" for one in changes]
    return (*said, *_shown(mask, p)) if masks else tuple(said)


def _of_mask(mask: Function) -> str:
    """Say how tiles of a function are found."""
    from ..program.bounds import hides_later_keys  # on first use, for a quick import of the package
    from ..program.shape import shape

    return CLASSES[shape(mask.text).name] + "; it hides later keys, j > i" * hides_later_keys(mask.text)


def _of_score(score: Function) -> str:
    """Say what bounds the logits of a function, what tables save it, and which of its tensors learn."""
    from ..program.bounds import limits  # on first use, as above
    from ..program.distance import split

    found = limits(score.text)
    tables = split(score.text, len(score.given), len(score.numbers)) is not None
    learning = sum(t.is_floating_point() and t.requires_grad for t in score.given)
    of = f"; {learning} of {len(score.given)} captured tensors get gradients" if score.given else ""
    said = f"logits lie between {found[0]:g} and {found[1]:g}" if found else "logits may have any size"
    return said + "; in large calls, what depends on i - j alone is read from a table" * tables + of


def _shown(mask: Mask, p: Problem) -> list[str]:
    """Count the tiles of a mask; nothing where sequences differ in length, or there are too many."""
    from ..program.bounds import Grid, look, tiles  # on first use, as above

    found = mask.traced
    grid = Grid(p.B, p.H, p.M, p.N, SIDE, SIDE, (found.align == "last") * (p.N - p.M))
    if not p.layout.uniform or p.B * p.H * -(-p.M // SIDE) * -(-p.N // SIDE) > MOST_TILES:
        return []
    some, every = tiles(found.program, found.tensors, found.numbers, grid)
    known = int((some & ~every).sum()) * SIDE**2 <= MOST_ENTRIES
    if known:
        some, every = look(found.program, found.tensors, found.numbers, grid, some, every)
    count, seen, whole = some.numel(), int(some.sum()), int(every.sum())
    least, most = ("", "") if known else ("at least ", "at most ")
    skipped, masked = f"{least}{count - seen} of {count} skipped", f"{most}{seen - whole} masked"
    return [f"tiles of {SIDE} x {SIDE}: {skipped}, {masked}, {least}{whole} whole"]


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
    found = (describe if addressed else describe_fake)(x, recipe, longest)
    return found._replace(target=target, matmul=matmul, within=inside(x.k, x.v, addressed))
