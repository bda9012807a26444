"""Ablations: change one thing in a back end's forward, to see what it is worth.

A change takes tilewise's launch and returns another one. If it finds nothing to change, it returns the same launch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.call.backend import against
from tilewise.call.check import describe_fake
from tilewise.call.operands import Operands, Saved
from tilewise.call.problem import Problem, target_of
from tilewise.call.recipe import Recipe

if TYPE_CHECKING:  # Triton need not be installed
    from tilewise.host.launch import Launch


class Change(NamedTuple):
    """One thing that is different, and in which back end."""

    backend: str
    apply: Callable[["Launch"], "Launch"]

    @property
    def peer(self) -> str:
        """Return the name of the implementation that it is compared with."""
        return "tilewise" if self.backend == "hopper" else f"tilewise {self.backend}"


def problem(change: Change, x: Operands, causal: bool, target: str) -> Problem:
    """Return the problem of the forward to change, on a chip."""
    recipe = Recipe(mask=(("Causal",),) if causal else (), backend=change.backend)
    return describe_fake(x, recipe, (0, 0), target)


def forward(p: Problem, x: Operands) -> tuple["Launch", Saved]:
    """Return tilewise's launch, and the tensors that it writes; with meta tensors nothing can run."""
    from tilewise.host.launch import current_stream
    from tilewise.host.outputs import empty_saved

    saved, device = empty_saved(p, x, None), x.q.device
    if p.recipe.backend == "hopper":
        from tilewise.hopper import launch as hopper
        from tilewise.hopper.plan import plan as hopper_plan

        counter = (
            hopper.counter(device, current_stream(device))
            if x.q.is_cuda
            else torch.zeros(2, dtype=torch.int32, device=device)
        )
        (launch,) = hopper.forward_launches(p, hopper_plan(p), x, saved, counter)
    else:
        from tilewise.triton import launch as portable
        from tilewise.triton.plan import plan as portable_plan

        (launch,) = portable.forward_launches(p, portable_plan(p), x, saved)
    return launch, saved


def attention(change: Change, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the changed forward as a function of q, k and v."""
    compiled: dict[Any, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = Operands(q, k, v, ())
        launch, saved = forward(problem(change, x, causal, target_of(q.device)), x)
        change.apply(launch)._replace(compiled=compiled).run()
        return saved.o

    return attend


def why_not(change: Change, shape: tuple[int, ...], dtype: torch.dtype, causal: bool, target: str) -> str | None:
    """Return the reason against a change for self-attention of this shape: its back end's reasons, or nothing to
    change."""
    q = torch.empty(shape, dtype=dtype, device="meta")
    x = Operands(q, q, q, ())
    p = problem(change, x, causal, target)
    if reasons := against(change.backend, p):
        return "; ".join(reasons)
    launch, _ = forward(p, x)
    return f"would change nothing, {change.peer} does so itself" if change.apply(launch) is launch else None


# Hopper's forward


def without_warp_roles(launch: "Launch") -> "Launch":
    """Let each program compute one tile of queries, and its warps load for themselves.

    Three warpgroups cannot share a tensor, because Triton's counts of warps are powers of two, so there are two.
    """
    from tilewise.hopper.descriptors import Descriptor
    from tilewise.host.arguments import odd

    from .kernels import one_role

    given = by_name(launch)
    tile = launch.constants["tile"]._replace(WARPGROUPS=2)
    B_r = 64 * tile.WARPGROUPS
    if given["variant"].mask and tile.B_C % B_r:  # the diagonal of all rows crosses several tiles of keys
        tile = tile._replace(MASK_IN_LOOP=True)
    shape = given["shape"]._replace(tiles=odd(-(-(given["shape"].M // 2) // B_r)))
    Q, O = (Descriptor(given[name].base, given[name].box._replace(block_shape=[1, 1, B_r, tile.D])) for name in "QO")
    arguments = Q, given["K"], given["V"], O, given["L"], given["variant"], given["c"], shape
    constants = {"order": launch.constants["order"], "tile": tile, "num_warps": 4 * tile.WARPGROUPS}
    return launch._replace(kernel=one_role, programs=programs_of(shape), arguments=arguments, constants=constants)


def without_overlap(launch: "Launch") -> "Launch":
    """O += P V is over before the next softmax begins."""
    return with_tile(launch, WAIT_PV=3)


def without_turns(launch: "Launch") -> "Launch":
    """No named barriers between warpgroups."""
    return with_tile(launch, PINGPONG=False)


def with_turns(launch: "Launch") -> "Launch":
    """Named barriers order the warpgroups' products."""
    return with_tile(launch, PINGPONG=True)


def without_persistence(launch: "Launch") -> "Launch":
    """Start a program for every tile.

    The counter's next tile is past the end, so each program draws one tile and ends.
    """
    return launch._replace(programs=programs_of(by_name(launch)["shape"]))


def programs_of(shape: Any) -> int:
    """Count the tiles of a launch, whose shape holds counts as 2 n + 1."""
    return (shape.heads // 2) * (shape.tiles // 2)


def shortest_first(launch: "Launch") -> "Launch":
    """Reverse the order of tiles; without a mask all tiles are equally long."""
    from .kernels import shortest_first as order

    masked = by_name(launch)["variant"].mask
    return launch._replace(constants=launch.constants | {"order": order}) if masked else launch


def whole_corners(launch: "Launch") -> "Launch":
    """Warpgroup 0 computes the half of its first tile that its rows do not see, too."""
    return with_tile(launch, HALF_FIRST_TILE=False)


def masks_everywhere(launch: "Launch") -> "Launch":
    """Apply the mask to all tiles, also to those wholly seen."""
    from .kernels import NO_TILE_FULL

    variant = by_name(launch)["variant"]
    variant = variant._replace(mask=(*variant.mask, NO_TILE_FULL))
    return with_tile(with_arguments(launch, variant=variant), MASK_IN_LOOP=True)


# The portable forward


def four_warps(launch: "Launch") -> "Launch":
    """Give a program four warps."""
    return with_warps(launch, 4)


def eight_warps(launch: "Launch") -> "Launch":
    """Give a program eight warps."""
    return with_warps(launch, 8)


def keys_outside(launch: "Launch") -> "Launch":
    """Use FlashAttention-1's order, with a program for every head.

    Each key tile is a pass over O, so tiles are as large as fit.
    """
    from tilewise.tile.rows import Rows

    from .kernels import keys_outside as kernel

    given = by_name(launch)
    o, L = given["O"].ptr, given["L"]
    sums = torch.zeros(o.shape, dtype=torch.float32, device=o.device)
    batch, row, head, _ = sums.stride()
    running = Rows(sums, batch, row, head), torch.full_like(L, -torch.inf), torch.zeros_like(L)
    arguments = *(given[name] for name in "QKVOL"), *running, *(given[name] for name in ("variant", "c", *"MNH"))
    tile = launch.constants["tile"]
    tile = tile._replace(B_R=64, B_C=128 if tile.d <= 128 else 64)
    constants = {"tile": tile, "num_warps": 8, "num_stages": 2}
    return launch._replace(
        kernel=kernel, programs=given["schedule"].heads // 2, arguments=arguments, constants=constants
    )


CHANGES = {
    "without warp roles": Change("hopper", without_warp_roles),
    "without overlap": Change("hopper", without_overlap),
    "without ping-pong": Change("hopper", without_turns),
    "with ping-pong": Change("hopper", with_turns),
    "without persistence": Change("hopper", without_persistence),
    "shortest tiles first": Change("hopper", shortest_first),
    "whole corners": Change("hopper", whole_corners),
    "masks on every tile": Change("hopper", masks_everywhere),
    "triton, 4 warps": Change("triton", four_warps),
    "triton, 8 warps": Change("triton", eight_warps),
    "triton, keys outside": Change("triton", keys_outside),
}
"""Every change, by name."""


# Changing a launch


def by_name(launch: "Launch") -> dict[str, Any]:
    """Return a launch's arguments by the kernel's parameter names."""
    return dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))


def with_arguments(launch: "Launch", **changed: Any) -> "Launch":
    """Replace some arguments."""
    return launch._replace(arguments=tuple((by_name(launch) | changed).values()))


def with_tile(launch: "Launch", **changed: Any) -> "Launch":
    """Replace constants of Hopper's tile."""
    tile = launch.constants["tile"]
    other = tile._replace(**changed)
    return launch if other == tile else launch._replace(constants=launch.constants | {"tile": other})


def with_warps(launch: "Launch", warps: int) -> "Launch":
    """Change the number of warps, and drop a cap on registers, which belongs to the old one."""
    if launch.constants["num_warps"] == warps:
        return launch
    constants = {name: value for name, value in launch.constants.items() if name != "maxnreg"}
    return launch._replace(constants=constants | {"num_warps": warps})
