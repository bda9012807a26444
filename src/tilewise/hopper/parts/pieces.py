"""Hold tiles of rows whose size is no power of two, in pieces whose columns are: 192 columns as 128 and 64.

Tensors in registers and shared memory have powers of two as sizes. So Q, K, V and O are tuples of pieces. A product
over the columns runs through them, piece after piece, into one accumulator. A product whose result has the columns has
an accumulator for each. TMA reads and writes boxes that are as wide as its descriptor says, one after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from . import triton_compat
from .channel import stage_in_loop


@gluon.constexpr_function
def pieces_of(columns):
    """Return the columns of the pieces of so many."""
    return (256,) * (columns // 256) + tuple([piece for piece in (128, 64, 32) if columns & piece])


@gluon.constexpr_function
def bytes_of(box, columns):
    """Count the bytes of a tile with so many columns that TMA loads in boxes."""
    return box.nbytes * (columns // box.shape[3])


@gluon.jit
def allocate(X, dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate the stages of a tile that TMA reads or writes by descriptor X."""
    PIECES: gl.constexpr = pieces_of(COLUMNS)
    memory = ()
    for n in gl.static_range(len(PIECES)):
        memory += (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, PIECES[n]], X.layout),)
    return memory


@gluon.jit
def boxes(X, piece):
    """View a piece's stages as boxes of X."""
    WIDTH: gl.constexpr = X.block_type.shape[3]
    COUNT: gl.constexpr = piece.shape[4] // WIDTH
    if COUNT == 1:
        return piece
    else:
        shape: gl.constexpr = [piece.shape[0] * COUNT, 1, 1, piece.shape[3], WIDTH]
        return triton_compat.reinterpret(piece, X.dtype, shape, X.layout)


@gluon.jit
def load_piece(X, b, h, row, column, bar, piece, n):
    """Load the columns of a piece from `column` on into its stage n."""
    WIDTH: gl.constexpr = X.block_type.shape[3]
    COUNT: gl.constexpr = piece.shape[4] // WIDTH
    for c in gl.static_range(COUNT):
        triton_compat.load(X, [b, h, row, column + c * WIDTH], bar, boxes(X, piece).index(n * COUNT + c))


@gluon.jit
def load_pieces(X, b, h, row, bar, memory, n, column=0):
    """Load a tile of rows, from `row` and `column` on, into stage n."""
    for p in gl.static_range(len(memory)):
        load_piece(X, b, h, row, column, bar, memory[p], n)
        column += memory[p].shape[4]


@gluon.jit
def store_piece(X, x, b, h, row, column, piece, n, COLUMNS: gl.constexpr):
    """Store rows of a piece from registers, through stage n of memory that has as many columns or more."""
    ROWS: gl.constexpr = piece.shape[3]
    WIDTH: gl.constexpr = X.block_type.shape[3]
    COUNT: gl.constexpr = COLUMNS // WIDTH
    memory = piece.index(n)
    triton_compat.reinterpret(memory, X.dtype, [1, 1, ROWS, COLUMNS], X.layout).reshape([ROWS, COLUMNS]).store(x)
    fence_async_shared()
    parts = triton_compat.reinterpret(memory, X.dtype, [COUNT, 1, 1, ROWS, WIDTH], X.layout)
    for c in gl.static_range(COUNT):
        triton_compat.store(X, [b, h, row, column + c * WIDTH], parts.index(c))


@gluon.jit
def tile_of(memory, n):
    """Return the pieces of stage n, as matrices."""
    pieces = ()
    for p in gl.static_range(len(memory)):
        pieces += (memory[p].index(n).reshape([memory[p].shape[3], memory[p].shape[4]]),)
    return pieces


@gluon.jit
def tile_at(memory, n):
    """Return the pieces of use n."""
    return tile_of(memory, n % memory[0].shape[0])


@gluon.jit
def tile_in_loop(memory, n, y):
    """Return the pieces of use n, which lasts for a whole loop over other uses y (see `stage_in_loop`)."""
    pieces = ()
    for p in gl.static_range(len(memory)):
        pieces += (stage_in_loop(memory[p], n, y).reshape([memory[p].shape[3], memory[p].shape[4]]),)
    return pieces


@gluon.jit
def rows_of(pieces, ROW: gl.constexpr, COUNT: gl.constexpr = 64):
    """Return COUNT rows of all pieces, from ROW on."""
    found = ()
    for p in gl.static_range(len(pieces)):
        found += (pieces[p].slice(ROW, COUNT, 0),)
    return found


@gluon.jit
def halves_of(parts):
    """Return the first half of a tuple, and the second."""
    HALF: gl.constexpr = len(parts) // 2
    first, second = (), ()
    for p in gl.static_range(HALF):
        first += (parts[p],)
        second += (parts[HALF + p],)
    return first, second


@gluon.jit
def contract(q, k, S, ADD: gl.constexpr = False):
    """Start Q K^T, or S += Q K^T with ADD."""
    for p in gl.static_range(len(q)):
        S = warpgroup_mma(q[p], k[p].permute((1, 0)), S, use_acc=ADD or p > 0, is_async=True)
    return S


@gluon.jit
def expand(p, v, sums):
    """Start sums += P V, in each piece of the columns."""
    found = ()
    for n in gl.static_range(len(sums)):
        found += (warpgroup_mma(as_factor_of(p, sums[n]), v[n], sums[n], is_async=True),)
    return found


@gluon.jit
def as_factor_of(p, sums):
    """Return P as the left factor of a product that lies as these sums do. No entry moves."""
    return gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2), assert_trivial=True)


@gluon.jit
def wait_for(LATER: gl.constexpr, pieces):
    """Wait until the products of all pieces are complete, but not those of the LATER ones."""
    found = warpgroup_mma_wait(LATER, pieces)
    if len(pieces) == 1:
        return (found,)
    else:
        return found


@gluon.jit
def wait_for_both(LATER: gl.constexpr, pieces, x):
    """Do so for the products of all pieces, and another."""
    found = warpgroup_mma_wait(LATER, pieces + (x,))
    complete = ()
    for p in gl.static_range(len(pieces)):
        complete += (found[p],)
    return complete, found[len(pieces)]


@gluon.jit
def zeros_of(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return zeros for each piece of so many columns, which lie as products do."""
    PIECES: gl.constexpr = pieces_of(COLUMNS)
    found = ()
    for p in gl.static_range(len(PIECES)):
        found += (zeros_of_piece(ROWS, PIECES[p]),)
    return found


@gluon.jit
def zeros_of_piece(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return zeros for one piece."""
    return gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def by_rows(x, factor):
    """Multiply each row by its factor."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def times(pieces, factor):
    """Multiply each row of all pieces by its factor."""
    found = ()
    for p in gl.static_range(len(pieces)):
        found += (by_rows(pieces[p], factor),)
    return found


@gluon.jit
def scaled(pieces, factor):
    """Multiply all pieces by a number."""
    found = ()
    for p in gl.static_range(len(pieces)):
        found += (pieces[p] * factor,)
    return found
