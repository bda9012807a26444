"""Order the tiles of the backward by gradient, and place dS in memory.

A loop has the key tiles of one key head, and the query heads that a program loops over. With packed sequences it has
those of every sequence. A chunk has some of its key tiles, or all: as many as have their dS in memory at one time.
Chunks that run concurrently are a section. Programs take items from one queue:

    key tiles      compute dK, dV and dS
    query tiles    compute dQ = dS K

First come the key tiles of the first section. Then those of the next and the query tiles of the one before take turns.
An item only waits for items before it in the queue.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.rows import first_block, rows_of
from ..parts.channel import Channel, arrive, barriers, stage, wait, wait_before
from .keys import Keys

QUERIES = gl.constexpr(128)
"""Counts the queries of a query tile here: each group of warps has half of them."""


class Shape(NamedTuple):
    """Hold factors, lengths and counts of a launch; for packed sequences, M and N count all rows."""

    unit: object
    """Turns logits into base 2."""
    factor: object
    """Is the scale of the logits, which dQ and dK take."""
    M: object
    N: object
    d: object
    d_v: object
    B: object
    H: object
    blocks: object
    """Counts the blocks of B_r queries of a head; of packed sequences, all together."""
    key_tiles: object
    """Counts the key tiles of a loop, likewise."""
    query_tiles: object
    """Counts the query tiles of a head, likewise."""
    heads: object
    """Counts the loops."""
    chunks: object
    """Counts the chunks of a loop."""
    tiles: object
    """Counts the key tiles of a chunk."""
    section: object
    """Counts the chunks that run concurrently."""
    resident: object
    """Counts the chunks that have memory for dS."""
    seen: object
    """Bounds the blocks of queries that see a key tile."""
    semaphores: object
    """Counts the semaphores of GQA sums, which lie before other counts."""


class Work(NamedTuple):
    """Hold what a launch writes beside gradients."""

    counts: object
    """Hold semaphores of GQA sums, then a tag for each tile of dS in memory (see `tag_of`). Behind them, each chunk
    counts its key tiles that are done, and halves of query tiles. All are int32, and 0 before."""
    sums: object
    """Hold sums of dQ in fp32 between the chunks of a loop; None if each loop is one chunk."""
    gqa_sums: object
    shift: object
    counter: object
    """Counts the items that programs have taken."""


class Item(NamedTuple):
    """Hold an item of the queue."""

    of_keys: object
    """Says whether it is a key tile, and not a query tile."""
    chunk: object
    n: object
    """Is its number in the chunk."""
    exists: object


class Message(NamedTuple):
    """Hold what the producer warp tells the others of an item."""

    t: object
    """Is its number, or one past the end."""
    b: object
    """Is its sequence, if sequences are packed."""
    lo: object
    """Begins the range of the chunk's key tiles that have dS for a query tile."""
    hi: object


@gluon.jit
def items(shape, tile: gl.constexpr):
    """Count the numbers of the queue; not all exist."""
    keys, queries = shape.section * shape.tiles, shape.section * tile.GROUP * shape.query_tiles
    return keys + gl.cdiv(shape.heads * shape.chunks, shape.section) * (keys + queries)


@gluon.jit
def item_at(t, shape, tile: gl.constexpr):
    """Return item t. The chunks of a section take turns, so that the longest tiles of all come first."""
    of_keys, of_queries = shape.section * shape.tiles, shape.section * tile.GROUP * shape.query_tiles
    s, x = (t - of_keys) // (of_keys + of_queries), (t - of_keys) % (of_keys + of_queries)
    first = t < of_keys
    is_keys = first | (x < of_keys)
    s = gl.where(first, 0, gl.where(is_keys, s + 1, s))
    x = gl.where(first, t, gl.where(is_keys, x, x - of_keys))
    width = gl.minimum(shape.heads * shape.chunks - s * shape.section, shape.section)
    n = x // gl.maximum(width, 1)
    exists = (width > 0) & (n < gl.where(is_keys, shape.tiles, tile.GROUP * shape.query_tiles))
    return Item(is_keys, s * shape.section + x % gl.maximum(width, 1), n, exists)


@gluon.jit
def key_tile_of(n, part, shape, tile: gl.constexpr):
    """Return key tile n of chunk `part` of a loop; past the end where there is none. PAIRED chunks have tiles from both
    ends of the loop."""
    if tile.PAIRED:
        half = shape.tiles // 2
        early, late = part * half + n, part * half + shape.tiles - 1 - n
        early = gl.where(2 * early < shape.key_tiles, early, shape.key_tiles)
        late = gl.where(2 * late < shape.key_tiles - 1, shape.key_tiles - 1 - late, shape.key_tiles)
        return gl.where(n < half, early, late)
    else:
        return part * shape.tiles + n


@gluon.jit
def sequence_of(cu, total, x, count, SIZE: gl.constexpr):
    """Return which of `count` packed sequences has block x, where each begins with a new block of SIZE rows (see
    `first_block`)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    before = 0
    for first in range(0, count, 128):
        b = first + gl.arange(0, 128, layout)
        start = gl.minimum(gl.maximum(gl.load(cu + b, mask=b < count, other=0), 0), total)
        before += gl.sum(((start // SIZE + b <= x) & (b < count)).to(gl.int32), 0)
    return gl.maximum(before - 1, 0)


@gluon.jit
def sequence_at(item, call, tile: gl.constexpr):
    """Return the sequence of an item, if sequences are packed."""
    if call.packed is None:
        return 0
    else:
        shape = call.shape
        keys = item.chunk % shape.chunks * shape.tiles + item.n
        queries = shape.query_tiles - 1 - item.n // tile.GROUP
        b = 0
        if item.of_keys:
            b = sequence_of(call.packed.cu_k, shape.N, keys, shape.B, tile.B_C)
        else:
            b = sequence_of(call.packed.cu_q, shape.M, queries, shape.B, QUERIES)
        return b


@gluon.jit
def heads_at(item, b, call, tile: gl.constexpr):
    """Return the batch entry of a chunk, and its place among the loops of one."""
    loop, loops = item.chunk // call.shape.chunks, call.shape.H // tile.GROUP
    if call.packed is None:
        return loop // loops, loop % loops
    else:
        return b, loop


@gluon.jit
def keys_at(item, b, call, tile: gl.constexpr):
    """Locate a key tile. There is none if j0 >= N."""
    shape, part = call.shape, item.chunk % call.shape.chunks
    b, w = heads_at(item, b, call, tile)
    q0, M, k0, N = rows_of(call.packed, b, shape.M, shape.N)
    t = key_tile_of(item.n, part, shape, tile) - first_block(call.packed, b, 0, 0, k0, 0, tile.B_C)
    return Keys(b, w * tile.GROUP, w // tile.GQA_PROGRAMS, t, t * tile.B_C, q0, k0, M, N, 1)


class Queries(NamedTuple):
    """Locate a query tile, and its chunk."""

    chunk: object
    part: object
    """Is the chunk's number in its loop."""
    b: object
    h: object
    h_k: object
    g: object
    """Is the query head's number in the loop."""
    x: object
    """Is the query tile's number in its head."""
    i0: object
    q0: object
    k0: object
    M: object
    N: object
    first: object
    """Is the chunk's number of the first key tile of this sequence; negative if that is in a chunk before."""
    end: object
    """Is the number behind the last; behind the chunk's tiles if that is in a later chunk."""


@gluon.jit
def queries_at(item, b, call, tile: gl.constexpr):
    """Locate a query tile. The last come first: with causal masks they are the longest."""
    shape, part = call.shape, item.chunk % call.shape.chunks
    b, w = heads_at(item, b, call, tile)
    q0, M, k0, N = rows_of(call.packed, b, shape.M, shape.N)
    g, x = item.n % tile.GROUP, shape.query_tiles - 1 - item.n // tile.GROUP
    i0 = (x - first_block(call.packed, b, 0, 0, q0, 0, QUERIES)) * QUERIES
    if tile.PAIRED:  # each chunk has keys for every query
        first = gl.where(part == 0, 0, -1)
        end = shape.tiles + gl.where(part == shape.chunks - 1, 0, 1)
    else:
        first = first_block(call.packed, b, 0, 0, k0, 0, tile.B_C) - part * shape.tiles
        end = first + gl.maximum(gl.cdiv(N, tile.B_C), 1)
    h_k = w // tile.GQA_PROGRAMS
    return Queries(item.chunk, part, b, w * tile.GROUP + g, h_k, g, x, i0, q0, k0, M, N, first, end)


@gluon.jit
def has_rows(queries, shape):
    """Return whether there are queries, and keys of their sequence in the chunk. (A sequence without keys has an empty
    tile, whose chunk stores zeros.)"""
    return (queries.i0 < queries.M) & (queries.end > 0) & (queries.first < shape.tiles)


@gluon.jit
def first_key(n, queries, call, tile: gl.constexpr):
    """Return the first row of the chunk's key tile n, in the sequence of these queries."""
    if call.packed is None:
        return key_tile_of(n, queries.part, call.shape, tile) * tile.B_C
    else:
        return (n - queries.first) * tile.B_C


@gluon.jit
def tiles_of_ds(shape, tile: gl.constexpr):
    """Count the tiles of dS of a chunk and a query head that have memory."""
    if tile.PAIRED:
        return shape.tiles // 2 * (shape.blocks + 1)
    else:
        return shape.tiles * shape.seen


@gluon.jit
def ds_at(chunk, g, m, n, shape, tile: gl.constexpr):
    """Return where dS of block m of queries and of the chunk's key tile n is, in tiles. Of a key tile, `seen` blocks
    follow each other at most. PAIRED tiles share a row of `blocks` + 1, one from its end and one from its beginning: of
    T blocks, causal key tile t has T - t, and tile T - 1 - t has t + 1."""
    first = (chunk % shape.resident * tile.GROUP + g) * tiles_of_ds(shape, tile)
    if tile.PAIRED:
        early = n < shape.tiles // 2
        row = gl.where(early, n, shape.tiles - 1 - n)
        return first + row * (shape.blocks + 1) + gl.where(early, m + 1, shape.blocks - 1 - m)
    else:
        return first + m % shape.seen * shape.tiles + n


@gluon.jit
def tag_of(chunk, m, n, shape, tile: gl.constexpr):
    """Return what the tag of a tile of dS is once it holds that of this chunk, block and key tile."""
    tag = chunk // shape.resident * (shape.blocks + 1) + m + 1
    return 2 * tag + (n < shape.tiles // 2).to(gl.int32) if tile.PAIRED else tag


@gluon.jit
def tags(work, shape):
    """Return where tags are."""
    return work.counts + shape.semaphores


@gluon.jit
def keys_done(work, chunk, shape, tile: gl.constexpr):
    """Return where the key tiles of a chunk are counted."""
    return tags(work, shape) + shape.resident * tile.GROUP * tiles_of_ds(shape, tile) + chunk


@gluon.jit
def queries_done(work, chunk, shape, tile: gl.constexpr):
    """Return where halves of its query tiles are counted."""
    return keys_done(work, chunk, shape, tile) + shape.heads * shape.chunks


@gluon.jit
def all_queries(shape, tile: gl.constexpr):
    """Return what that count is in the end."""
    return 2 * tile.GROUP * shape.query_tiles


@gluon.jit
def message_channel(CONSUMERS: gl.constexpr):
    """Allocate the channel of messages, to CONSUMERS other warps or groups."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = ()
    for _ in gl.static_range(4):
        memory += (gl.allocate_shared_memory(gl.int32, [2, 1], layout),)
    return Channel(memory, barriers(2, 1), barriers(2, CONSUMERS))


@gluon.jit
def send(messages, message, n):
    """Send message n."""
    wait_before(messages.empty, n)
    for x in gl.static_range(4):
        value = gl.full([1], message[x], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        stage(messages.memory[x], n).store(value)
    arrive(messages.full, n)


@gluon.jit
def receive(messages, n, WARPS: gl.constexpr):
    """Return message n."""
    wait(messages.full, n)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    t = gl.max(stage(messages.memory[0], n).load(layout), 0)
    b = gl.max(stage(messages.memory[1], n).load(layout), 0)
    lo = gl.max(stage(messages.memory[2], n).load(layout), 0)
    hi = gl.max(stage(messages.memory[3], n).load(layout), 0)
    arrive(messages.empty, n)
    return Message(t, b, lo, hi)
