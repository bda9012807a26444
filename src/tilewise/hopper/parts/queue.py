"""Schedule tiles dynamically: programs fetch their numbers from a counter in memory, so that all finish together.

The producer warp fetches a tile's number and sends it to the other warps through a channel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channel import Channel, arrive, barriers, stage, wait, wait_before


@gluon.jit
def tile_channel(CONSUMERS: gl.constexpr):
    """Allocate the channel through which a producer warp sends tile numbers to CONSUMERS others."""
    memory = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Channel(memory, barriers(2, 1), barriers(2, CONSUMERS))


@gluon.jit
def fetch_next_tile(counter):
    """Fetch the next tile, where programs begin with the tile of their program number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1)


@gluon.jit
def fetch_tile(counter):
    """Fetch the next tile, where programs fetch their first, too. Tiles before it belong to programs that run, so that
    one may wait for them."""
    return gl.atomic_add(counter, 1)


@gluon.jit
def skip_to(counter, t):
    """Skip the tiles before t that no program has fetched yet."""
    gl.atomic_max(counter, t)


@gluon.jit
def send_tile(tile_ids, t, n):
    """Send tile t as message n; the last of all is past the end."""
    wait_before(tile_ids.empty, n)
    stage(tile_ids.memory, n).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    arrive(tile_ids.full, n)


@gluon.jit
def receive_tile(tile_ids, n, WARPS: gl.constexpr):
    """Return the tile of message n."""
    wait(tile_ids.full, n)
    t = gl.max(stage(tile_ids.memory, n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    arrive(tile_ids.empty, n)
    return t


@gluon.jit
def reset_counter(counter):
    """Count this program as done; the last one resets the counter to zero, for the next launch."""
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
