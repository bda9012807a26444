"""What the fp32 backward's main kernel reads, made in Triton's interpreter where there is no GPU.

Gradients computed from it in fp64 are those of the operands.
"""

import pytest
import torch

import tilewise as tw
from tilewise.attention.api import with_defaults
from tilewise.attention.reference import attention, gradients
from tilewise.call.check import check_arguments, describe
from tilewise.call.operands import Grads, Saved
from tilewise.hopper.fp32 import backward_launch as backward
from tilewise.hopper.fp32 import launch as fp32_launch
from tilewise.hopper.fp32.split import attention_split_fp32
from tilewise.host.plan import Launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ("fp16x3", "bf16x6")


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def described(q, k, v, **options):
    """The problem and its operands."""
    given = with_defaults("attention", options)
    del given["seed"], given["return_lse"]
    x, *rest = check_arguments(q, k, v, **given)
    return describe(x, *rest), x


def run(launch):
    """In the interpreter, which has no next kernel."""
    launch._replace(constants={**launch.constants, "PDL": False}).run()


def preparation(q, k, v, o, lse, do, dlse=None, kept=None, **options):
    """The problem, its scratch, and the launches in front of the main kernel's that fill it."""
    p, x = described(q, k, v, **options)
    grads = Grads(*(torch.empty(t.shape, device=DEVICE) for t in (q, k, v)), (None,) * len(x.extra))
    scratch, counter = backward.empty_scratch(p, q.device, kept), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    return p, scratch, backward.launches(p, Launched(), x, Saved(o, lse), do, dlse, scratch, grads, counter)[:-2]


def prepared(*given, **options):
    """The problem, and its scratch after the launches in front of the main kernel's."""
    p, scratch, launches = preparation(*given, **options)
    for launch in launches:
        run(launch)
    return p, scratch


def kept_by_forward(q, k, v, **options):
    """Pieces of K and V after the forward's first launch; NaN where nothing was written."""
    p, x = described(q, k, v, **options)
    keys = backward.empty_keys(p, q.device)
    for t in keys:
        t.fill_(torch.nan)
    saved = Saved(torch.empty_like(q), torch.empty(1, device=DEVICE))
    counter = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    splitting, _ = fp32_launch.forward_launches(p, fp32_launch.plan(p), x, saved, keys, counter)
    run(splitting)
    return keys


def same(some, others):
    """Whether tensors are equal, bit by bit, unwritten ones left out."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others, strict=True))


def numbers(pieces, descale):
    """What pieces stand for: (blocks, rows, columns), in fp64."""
    total = pieces.double().sum(0)
    return total * descale.double()[:, None, None] if pieces.dtype == torch.float16 else total


def by_head(p, blocks, heads):
    """Blocks of one number or of rows as (B, heads, rows, columns), zeros at the end included."""
    return blocks.reshape(p.B, heads, -1, blocks.shape[-1] if blocks.ndim == 3 else 1)


def from_scratch(p, s, mask):
    """dq, dk and dv in fp64 from what the main kernel reads, and whether its bounds hold."""
    group = p.H // p.H_k
    Q, dO = by_head(p, numbers(s.q, s.scales.q), p.H), by_head(p, numbers(s.do, s.scales.do), p.H)
    K, V = by_head(p, numbers(s.keys.k, s.scales.k), p.H_k), by_head(p, numbers(s.keys.v, s.scales.v), p.H_k)
    L, D = (t.double().view(p.B, p.H, -1, 1) for t in (s.rows.logs, s.rows.delta))
    K_each, V_each = K.repeat_interleave(group, 1), V.repeat_interleave(group, 1)
    seen = torch.zeros(Q.shape[2], K.shape[2], dtype=torch.bool, device=DEVICE)
    seen[: p.M, : p.N] = mask.dense(p.M, p.N)
    P = torch.where(seen, torch.exp(p.scale * Q @ K_each.mT - L), 0.0)
    dS = dO @ V_each.mT - D
    norms = [by_head(p, t.double(), p.H).repeat_interleave(64, 2) for t in (s.scales.do_norm, s.scales.D)]
    v_norm = by_head(p, s.scales.v_norm.double(), p.H_k).repeat_interleave(s.keys.v.shape[2], 2)
    v_norm = v_norm.repeat_interleave(group, 1)
    bounded = dS[:, :, : p.M].abs() <= ((norms[0] * v_norm.mT + norms[1]) * (1 + 1e-6))[:, :, : p.M]
    dS = P * dS
    dk, dv = p.scale * dS.mT @ Q, P.mT @ dO
    parts = p.scale * dS @ K_each, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)
    sizes = (p.M, p.D), (p.N, p.D), (p.N, p.D_v)
    inside = [part[:, :, :rows, :columns] for part, (rows, columns) in zip(parts, sizes, strict=True)]
    assert all(part.count_nonzero() == some.count_nonzero() for part, some in zip(parts, inside, strict=True))
    return [part.transpose(1, 2) for part in inside], bool(bounded.all())


def error(found, true):
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("mask", "with_dlse"), [(tw.Full(), False), (tw.Causal(), True)])
def test_gradients_follow_from_what_is_prepared(precision, mask, with_dlse):
    q, k, v, do = randn(2, 70, 4, 40), randn(2, 131, 2, 40), randn(2, 131, 2, 24), randn(2, 4, 70, 24).transpose(1, 2)
    dlse = randn(2, 4, 70) if with_dlse else None
    exact = [t.double() for t in (q, k, v)]
    o, lse = attention(*exact, mask=mask)
    p, scratch = prepared(q, k, v, o.float(), lse.float(), do, dlse, mask=mask, precision=precision)
    found, bounded = from_scratch(p, scratch, mask)
    true = gradients(*exact, do.double(), None if dlse is None else dlse.double(), mask=mask)
    assert bounded
    assert all(error(a, b) < 5e-7 for a, b in zip(found, true[:3], strict=True))
    assert not scratch.rows.dq.any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_far_keys_are_centred_so_that_errors_in_o_stay_small(precision):
    q, k, v, do = randn(1, 128, 1, 64), randn(1, 128, 1, 64), randn(1, 128, 1, 64), randn(1, 128, 1, 64)
    k += 3 * randn(64)
    v += 10
    exact = [t.double() for t in (q, k, v)]
    o, lse = attention(*exact, mask=tw.Causal())
    o = (o * (1 + 3e-7 * torch.randn_like(o))).float()  # as fp32 arithmetic leaves it
    true = gradients(*exact, do.double(), mask=tw.Causal()).q
    wrong = []
    for dlse in (None, torch.zeros_like(lse, dtype=torch.float32)):  # with a gradient of lse nothing is centred
        p, scratch = prepared(q, k, v, o, lse.float(), do, dlse, mask=tw.Causal(), precision=precision)
        wrong.append(error(from_scratch(p, scratch, tw.Causal())[0][0], true))
    assert wrong[0] < wrong[1] / 3


def test_garbage_behind_a_mask_is_no_centre():
    q, k, v, do = randn(1, 64, 1, 64), randn(1, 128 + 896, 1, 64), randn(1, 128 + 896, 1, 64), randn(1, 64, 1, 64)
    k[:, 128:], v[:, 128:] = 1e25, -1e25
    lengths = torch.tensor([128], device=DEVICE)
    exact = [t[:, :128].double() for t in (q, k, v)]
    o, lse = attention(*exact)
    p, scratch = prepared(q, k, v, o.float(), lse.float(), do, mask=tw.Padding(lengths), precision="fp16x3")
    K = by_head(p, numbers(scratch.keys.k, scratch.scales.k), 1)[0, 0, :128]
    assert error(K, exact[1][0, :, 0]) < 1e-7


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_sequences_get_blocks_of_their_own(precision):
    ends_q, ends_k = [0, 70, 70, 134], [0, 30, 160, 161]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=DEVICE) for ends in (ends_q, ends_k))
    q, k, v, do = randn(134, 2, 64), randn(161, 1, 64), randn(161, 1, 64), randn(134, 2, 64)
    layout = tw.Varlen(cu_q, cu_k, 70, 130)
    p, s = prepared(q, k, v, randn(134, 2, 64), randn(2, 134), do, layout=layout, precision=precision)
    Q, K = numbers(s.q, s.scales.q), numbers(s.keys.k, s.scales.k)
    for b in range(p.B):
        (first, end), (first_k, end_k) = ends_q[b : b + 2], ends_k[b : b + 2]
        for h in range(2):
            at = h * (134 // 64 + 3) + first // 64 + b
            rows = Q[at:].reshape(-1, 64)[: end - first]
            assert (rows - q[first:end, h].double()).abs().max() < 1e-6 if end > first else rows.numel() == 0
        keys = K[first_k // 128 + b :].reshape(-1, 64)
        taken = k[first_k:end_k, 0].double() - keys[: end_k - first_k]
        assert (taken - taken[:1]).abs().max() < 1e-6, "one vector is taken from all keys of a sequence"
        assert not keys[end_k - first_k : 128].any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_the_forward_keeps_what_the_backward_would_split(precision, size, packed):
    """The same blocks, zeros at their ends, scales and norms, where nothing is centred."""
    options = {"precision": precision}
    if packed:
        cu = torch.tensor([0, 130, 130, 200], dtype=torch.int32, device=DEVICE)
        q, k, v, lse = randn(200, 4, size), randn(200, 2, size), 7.0 * randn(200, 2, size - 8), randn(4, 200)
        options["layout"] = tw.Varlen(cu, cu, 130, 130)
    else:
        q, k, v, lse = randn(2, 70, 4, size), randn(2, 200, 2, size), 7.0 * randn(2, 200, 2, size - 8), randn(2, 4, 70)
    o, do = randn(*q.shape[:-1], size - 8), randn(*q.shape[:-1], size - 8)
    keys = kept_by_forward(q, k, v, **options)
    _, s, launches = preparation(q, k, v, o, lse, do, lse, **options)  # with a gradient of lse nothing is centred
    for t in s.keys:
        t.fill_(torch.nan)
    for launch in launches:
        run(launch)
    inside = ~s.keys.v_norm.isnan()
    in_head = {64: 4, 128: 6}[size] if packed else 2 * -(-200 // s.keys.k.shape[2])  # one of a sequence without keys
    assert inside.sum() == 2 * in_head
    assert same(s.keys, keys)
    rows = numbers(s.keys.v, s.scales.v if precision == "fp16x3" else s.scales.v_norm)[inside].norm(dim=-1).amax(-1)
    assert torch.allclose(rows, s.scales.v_norm[inside].double(), rtol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("far", [(0.0, 0.0), (3.0, 10.0), (0.0, 10.0)])
def test_kept_pieces_are_centred_where_they_must_be_and_every_backward_finds_its_own(precision, far):
    q, k, v, do = randn(1, 70, 2, 64), randn(1, 150, 1, 64), randn(1, 150, 1, 64), randn(1, 70, 2, 64)
    k += far[0] * randn(64)
    v += far[1]
    o, lse = attention(*(t.double() for t in (q, k, v)))
    given = q, k, v, o.float(), lse.float(), do
    kept = kept_by_forward(q, k, v, precision=precision)
    before = [t.clone() for t in kept]
    for dlse in (None, None, torch.ones_like(lse, dtype=torch.float32), None):  # a graph may be gone through again
        _, scratch = prepared(*given, dlse, kept, precision=precision)
        assert scratch.keys is kept
        _, alone = prepared(*given, dlse, precision=precision)
        assert same((*scratch[:2], *scratch.keys[:2]), (*alone[:2], *alone.keys[:2]))
        assert same(scratch.rows[:2], alone.rows[:2])
        used = scratch.scales if precision == "fp16x3" else (scratch.scales.v_norm,)
        assert same(used, alone.scales if precision == "fp16x3" else (alone.scales.v_norm,))
        assert same(kept, before) == (dlse is not None or not any(far))


def test_beside_a_sink_no_program_looks_at_kept_keys():
    q, k, o, lse = randn(1, 70, 2, 64), randn(1, 150, 1, 64) + 9.0, randn(1, 70, 2, 64), randn(1, 2, 70)
    options = {"sink": randn(2), "precision": "fp16x3"}
    kept = kept_by_forward(q, k, k, **options)
    before = [t.clone() for t in kept]
    _, scratch, (launch,) = preparation(q, k, k, o, lse, o, kept=kept, **options)
    assert launch.programs == 2 * 2 * 2, "of queries, and of their gradients"
    run(launch)
    _, alone = prepared(q, k, k, o, lse, o, **options)
    assert same(kept, before)
    assert same((*scratch[:2], *scratch.keys, *scratch.scales), (*alone[:2], *alone.keys, *alone.scales))


def test_pieces_of_another_precision_are_split_again():
    """Torch's setting may change between a forward and its backward."""
    q, k = randn(1, 70, 2, 64), randn(1, 150, 1, 64)
    kept = kept_by_forward(q, k, k, precision="fp16x3")
    saved = Saved(q, randn(1, 2, 70), None, kept)
    assert backward.saved_keys(described(q, k, k, precision="fp16x3")[0], saved) == kept
    assert backward.saved_keys(described(q, k, k, precision="bf16x6")[0], saved) is None
    assert backward.saved_keys(described(q, k, k, precision="fp16x3")[0], saved._replace(extra=())) is None


@pytest.mark.parametrize(("batch", "length", "kept"), [(2, 8192, True), (2, 8193, False), (400, 8192, False)])
def test_what_is_kept_takes_little_memory(batch, length, kept):
    q = torch.empty(batch, length, 16, 64, device="meta")
    p, _ = described(q, q, q, precision="fp16x3")
    assert fp32_launch.plan(p).saves is kept


@pytest.mark.parametrize("listed", [False, True])
def test_attention_may_begin_early_because_splitting_comes_right_before_it(listed):
    q = randn(1, 128, 1, 64)
    mask = tw.Dense(torch.ones(128, 128, dtype=torch.bool, device=DEVICE)) if listed else tw.Causal()
    p, x = described(q, q, q, mask=mask, precision="fp16x3")
    saved, counter = Saved(q, randn(1, 1, 128)), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    keys = backward.empty_keys(p, q.device)
    *before, splitting, attend = fp32_launch.forward_launches(p, fp32_launch.plan(p), x, saved, keys, counter)
    assert len(before) == listed
    assert (splitting.kernel, splitting.constants["PDL"]) == (attention_split_fp32, True)
    assert attend.constants["launch_pdl"]
    assert not any(launch.constants.get("launch_pdl") for launch in (*before, splitting)), "they wait for all before"
