"""Tiles of a launch, drawn from a counter in memory: whoever is done takes the next, so programs end together."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channel import Channel, arrive, barriers, stage, wait, wait_before


@gluon.jit
def tickets(CONSUMERS: gl.constexpr):
    """The channel on which a producer warp hands the tiles that it draws to so many others."""
    memory = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Channel(memory, barriers(2, 1), barriers(2, CONSUMERS))


@gluon.jit
def draw(counter):
    """The next tile, where programs begin with the tile of their own number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1)


@gluon.jit
def draw_in_turn(counter):
    """The next tile, where programs draw their first, too: tiles before it are with programs that run, so that one may
    wait for them."""
    return gl.atomic_add(counter, 1)


@gluon.jit
def skip_to(counter, t):
    """Tiles before t are not drawn any more."""
    gl.atomic_max(counter, t)


@gluon.jit
def hand_on(drawn, t, n):
    """Tile t as ticket n; the last ticket of all is past the end."""
    wait_before(drawn.empty, n)
    stage(drawn.memory, n).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    arrive(drawn.full, n)


@gluon.jit
def ticket(drawn, n, WARPS: gl.constexpr):
    """The tile on ticket n."""
    wait(drawn.full, n)
    t = gl.max(stage(drawn.memory, n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    arrive(drawn.empty, n)
    return t


@gluon.jit
def leave(counter):
    """The last program out leaves the counter at zero, for the next launch."""
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
