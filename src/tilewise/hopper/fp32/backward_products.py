"""Multiply 16-bit pieces in the fp32 backward, split P and dS into pieces, and descale."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def piece(memory, n, COLUMN: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return one piece of 64 rows, or 64 columns of it from COLUMN on."""
    x = memory.index(n).reshape([64, memory.shape[3]])
    if COLUMN is not None and memory.shape[3] > 64:
        x = x.slice(COLUMN, 64, 1)
    return x.permute((1, 0)) if TRANSPOSED else x


@gluon.jit
def pieces(memory, use, PIECES: gl.constexpr, COLUMN: gl.constexpr = None, TRANSPOSED: gl.constexpr = False):
    """Return all pieces of a block of rows."""
    found = ()
    for i in gl.static_range(PIECES):
        found = found + (piece(memory, use * PIECES + i, COLUMN, TRANSPOSED),)
    return found


@gluon.jit
def product(a, b, zero):
    """Start a b in a fresh accumulator: multiply pieces i and j with i + j < PIECES, the smallest products first."""
    PIECES: gl.constexpr = len(a)
    c = zero
    for s in gl.static_range(PIECES):
        for i in gl.static_range(PIECES - s):
            c = warpgroup_mma(a[i], b[PIECES - 1 - s - i], c, use_acc=s + i > 0, is_async=True)
    return c


@gluon.jit
def split_registers(x, PIECES: gl.constexpr):
    """Split numbers in registers into 16-bit pieces, two numbers at a time. An infinity goes into the last piece
    (split.py). Those before it are the largest finite number, which `satfinite` makes of it at no cost."""
    if PIECES == 2:
        return gl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            .reg .f32 x, y;
            cvt.rn.satfinite.f16x2.f32 $0, $3, $2;
            mov.b32 {a, b}, $0;
            cvt.f32.f16 x, a;
            cvt.f32.f16 y, b;
            sub.f32 x, $2, x;
            sub.f32 y, $3, y;
            cvt.rn.f16x2.f32 $1, y, x;
            }""",
            "=&r,=&r,f,f", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            .reg .f32 x, y, u, v;
            cvt.rn.satfinite.bf16x2.f32 $0, $4, $3;
            shl.b32 a, $0, 16;
            and.b32 b, $0, 0xffff0000;
            mov.b32 u, a;
            mov.b32 v, b;
            sub.f32 x, $3, u;
            sub.f32 y, $4, v;
            cvt.rn.satfinite.bf16x2.f32 $1, y, x;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0xffff0000;
            mov.b32 u, a;
            mov.b32 v, b;
            sub.f32 x, x, u;
            sub.f32 y, y, v;
            cvt.rn.bf16x2.f32 $2, y, x;
            }""",
            "=&r,=&r,=&r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def as_operand(a):
    """Return pieces in registers as the first operand of a product."""
    layout: gl.constexpr = gl.DotOperandLayout(0, a[0].type.layout, 2)
    found = ()
    for i in gl.static_range(len(a)):
        found = found + (gl.convert_layout(a[i], layout),)
    return found


@gluon.jit
def slot(W: gl.constexpr, i: gl.constexpr, SYNC_GROUPS: gl.constexpr):
    """Return where piece i of group W's dS lies: its first two are adjacent, as its piece of dQ takes their place."""
    if SYNC_GROUPS:
        return i
    else:
        return 2 * W + i if i < 2 else 4 + W


@gluon.jit
def store_ds(ds, memory, zero, W: gl.constexpr, SYNC_GROUPS: gl.constexpr):
    """Store dS to shared memory, and return it transposed. zero is one that ptxas cannot know: see
    channel.stage_in_loop."""
    found = ()
    for i in gl.static_range(len(ds)):
        at = memory.index(zero + slot(W, i, SYNC_GROUPS))
        at.store(ds[i])
        found = found + (at.permute((1, 0)),)
    return found


@gluon.jit
def descale_of(descale, block, PIECES: gl.constexpr):
    """Return the descale factor of a block's pieces; bf16's have none."""
    return gl.load(descale + block) if PIECES == 2 else 1.0


@gluon.jit
def power_above(bound):
    """Return 2^-e and 2^e for bound < 2^e."""
    e = gl.minimum(gl.maximum((bound.to(gl.int32, bitcast=True) >> 23) - 126, -126), 126)
    return ((127 - e) << 23).to(gl.float32, bitcast=True), ((127 + e) << 23).to(gl.float32, bitcast=True)
