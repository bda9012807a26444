"""View a tile of S as a warpgroup's threads hold it. A column is then a number of the thread's plus a constant; else
ptxas computes every column, or keeps each in a register."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def by_thread(S):
    """Reshape a tile of S into (row, block of 8 columns, thread, entry)."""
    return S.reshape([S.shape[0], S.shape[1] // 8, 4, 2])


@gluon.jit
def as_tile(x, S):
    """Undo `by_thread`."""
    return gl.convert_layout(x.reshape(S.shape), S.type.layout, assert_trivial=True)


@gluon.jit
def positions(S):
    """Return rows, the first column of each thread, and the others counted from it, as they broadcast by thread."""
    layout: gl.constexpr = by_thread(S).type.layout
    entries: gl.constexpr = gl.SliceLayout(2, layout)
    blocks: gl.constexpr = gl.SliceLayout(3, layout)
    row = gl.arange(0, S.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, blocks)))[:, None, None, None]
    block = gl.arange(0, S.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, blocks)))[None, :, None, None]
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, blocks)))[None, None, :, None]
    entry = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, entries)))[None, None, None, :]
    return row, 2 * thread, 8 * block + entry
