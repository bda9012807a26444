"""Stage 8: the forward in Gluon for Hopper. It needs an H100 or H200; elsewhere it can only be compiled.

Gluon is Triton without the automatic parts: layouts, shared memory, barriers and warps are written out. TMA copies
whole tiles when one thread asks, wgmma multiplies tiles in shared memory, and warps take roles (FlashAttention-3):

    load      one warp         asks TMA for Q once, and for K and V tiles as long as there is room
    attend    2 warpgroups     64 rows of queries each: S = Q K^T, the online softmax in registers, O += P V

One warpgroup's products run during the other's exponentials. The library's kernel also overlaps both within each.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # in newer Triton, and in 3.6
LOG2E, LN2 = gl.constexpr(1.4426950408889634), gl.constexpr(0.6931471805599453)
B_R, B_C, STAGES = gl.constexpr(128), gl.constexpr(128), gl.constexpr(2)


@gluon.jit
def key_tiles(i0, M, N, CAUSAL: gl.constexpr):
    """Tiles of keys that rows i0.. visit; at least one, so that a row without keys gets its zeros the same way."""
    return gl.maximum(gl.cdiv(gl.minimum(N, i0 + B_R + N - M) if CAUSAL else N, B_C), 1)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """One barrier a stage; its phase, 0 or 1, flips after COUNT arrivals. Warps wait for the end of a phase."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), COUNT)
    return bars


@gluon.jit
def load(Q, K, V, q, k, v, q_full, full, empty, M, N, CAUSAL: gl.constexpr):
    """The producer warp. Stage s is full when all its bytes have come, and empty when both warpgroups are done."""
    head, i0 = gl.program_id(1), gl.program_id(0) * B_R
    mbarrier.expect(q_full.index(0), 2 * Q.block_type.nbytes)
    for w in gl.static_range(2):
        copy(Q, [head, i0 + 64 * w, 0], q_full.index(0), q.index(w))
    for n in range(key_tiles(i0, M, N, CAUSAL)):
        s, phase = n % STAGES, n // STAGES & 1
        mbarrier.wait(empty.index(s), phase ^ 1)  # passes at once the first time round
        mbarrier.expect(full.index(s), 2 * K.block_type.nbytes)
        copy(K, [head, n * B_C, 0], full.index(s), k.index(s))
        copy(V, [head, n * B_C, 0], full.index(s), v.index(s))


@gluon.jit
def attend(W: gl.constexpr, O, L, q, k, v, q_full, full, empty, c, M, N, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Warpgroup W: rows 64 W to 64 W + 63 of the program's tile."""
    # layouts: which thread holds which number of S and O, as wgmma leaves them, and of their rows
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_C, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    head, i0 = gl.program_id(1), gl.program_id(0) * B_R
    i = i0 + 64 * W + gl.arange(0, 64, rows)
    last = gl.minimum(i + N - M, N - 1) if CAUSAL else i * 0 + N - 1  # the last key that each row sees
    seen = gl.minimum(i0 + N - M + 1, N) if CAUSAL else N  # keys before it are seen by every row: no mask
    # acc is O before the division; S of each tile starts from zero
    acc, zero = gl.zeros([64, D], gl.float32, o_layout), gl.zeros([64, B_C], gl.float32, s_layout)
    m, l = gl.full([64], float("-inf"), gl.float32, rows), gl.zeros([64], gl.float32, rows)
    my_q = q.index(W).reshape([64, D])
    mbarrier.wait(q_full.index(0), 0)
    for n in range(key_tiles(i0, M, N, CAUSAL)):
        s = n % STAGES
        mbarrier.wait(full.index(s), n // STAGES & 1)
        S = hopper.warpgroup_mma(my_q, k.index(s).reshape([B_C, D]).permute((1, 0)), zero, use_acc=False) * (c * LOG2E)
        if (n + 1) * B_C > seen:
            j = n * B_C + gl.arange(0, B_C, gl.SliceLayout(0, s_layout))
            S = gl.where(j[None, :] <= last[:, None], S, float("-inf"))
        m_new = gl.maximum(m, gl.max(S, 1))
        finite = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet: avoid inf - inf
        P = gl.exp2(S - finite[:, None])
        alpha = gl.exp2(m - finite)
        m, l = m_new, alpha * l + gl.sum(P, 1)
        p = gl.convert_layout(P.to(O.dtype.element_ty), gl.DotOperandLayout(0, o_layout, 2))  # stays in registers
        acc = hopper.warpgroup_mma(p, v.index(s).reshape([B_C, D]), acc * gl.convert_layout(alpha, o_rows)[:, None])
        mbarrier.arrive(empty.index(s))
    gl.store(L + head.to(gl.int64) * M + i, (m + gl.log2(l)) * LN2, mask=i < M)
    acc = acc / gl.convert_layout(gl.where(l == 0.0, 1.0, l), o_rows)[:, None]
    i = i0 + 64 * W + gl.arange(0, 64, o_rows)[:, None]
    at = (head.to(gl.int64) * M + i) * D + gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
    gl.store(O + at, acc.to(O.dtype.element_ty), mask=i < M)


@gluon.jit
def forward(Q, K, V, O, L, c, M, N, D: gl.constexpr, CAUSAL: gl.constexpr):
    """O and L, the lse, of 128 queries of a head. Producer: 1 warp, 24 registers a thread; each consumer: 4, 240."""
    q = gl.allocate_shared_memory(Q.dtype, [2, 1, 64, D], Q.layout)
    k = gl.allocate_shared_memory(K.dtype, [STAGES, 1, B_C, D], K.layout)
    v = gl.allocate_shared_memory(V.dtype, [STAGES, 1, B_C, D], V.layout)
    q_full, full, empty = barriers(1), barriers(1), barriers(2)
    hopper.fence_async_shared()
    gl.warp_specialize([
        (attend, (0, O, L, q, k, v, q_full, full, empty, c, M, N, D, CAUSAL)),
        (attend, (1, O, L, q, k, v, q_full, full, empty, c, M, N, D, CAUSAL)),
        (load, (Q, K, V, q, k, v, q_full, full, empty, M, N, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


def attention(Q, K, V, causal=False):
    """O and lse. fp16 or bf16, d of 64 or 128, contiguous."""
    (heads, M, d), N = Q.shape, K.shape[1]
    O, lse = torch.empty_like(Q), torch.empty(heads, M, dtype=torch.float32, device=Q.device)
    boxes = [[1, rows, d] for rows in (64, B_C.value, B_C.value)]  # what TMA copies at once, with 0 past the end
    layouts = [gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(Q.dtype)[6:])) for box in boxes]
    given = [TensorDescriptor.from_tensor(*one) for one in zip((Q, K, V), boxes, layouts, strict=True)]
    forward[(-(-M // B_R.value), heads)](*given, O, lse, d**-0.5, M, N, d, causal, num_warps=4)
    return O, lse


def main():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return print("no H100 or H200: nothing to run; the tests compile this file's kernel")
    Q, K, V = torch.randn(3, 2, 770, 64, device="cuda", dtype=torch.float16)
    truth = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=True)
    error = (attention(Q, K, V, causal=True)[0] - truth).abs().max().item()
    print(f"hopper forward: largest error {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
