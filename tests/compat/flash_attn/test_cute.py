"""FlashAttention-4's flash_attn.cute: its signatures, its windows and sinks, and what it refuses."""

import inspect

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat import flash_attn as two
from tilewise.compat import flash_attn_interface as three
from tilewise.compat.flash_attn import cute
from tilewise.compat.flash_attn.cute import flash_attn_combine, flash_attn_func, flash_attn_varlen_func

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, H_K, D, D_V = 4, 2, 16, 8
NONE = dict.fromkeys
SHARED = {
    "softmax_scale": None, "causal": False, "window_size": (None, None), "learnable_sink": None, "softcap": 0.0,
    "num_splits": 1, "pack_gqa": None, "deterministic": False, **NONE(("score_mod", "score_mod_bwd", "mask_mod")),
}  # fmt: skip
GATHER = {"gather_bwd_recompute_p": False, "gather_bwd_token_chunk": None}
SIGNATURES = {
    "flash_attn_func": {
        **NONE(("qv", "gather_kv_indices")),
        **SHARED,
        **NONE(("aux_tensors", "aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd")),
        "return_lse": False,
        **GATHER,
    },
    "flash_attn_varlen_func": {
        **NONE(("qv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "seqused_q")),
        **NONE(("seqused_k", "gather_kv_indices", "page_table")),
        **SHARED,
        **NONE(("block_sparse_tensors", "aux_tensors", "aux_scalars")),
        "return_lse": False,
        **NONE(("scheduler_metadata", "seqlen_k_per_split")),
        "disable_scheduler_metadata": False,
        **GATHER,
    },
}


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(cute, name)).parameters
    assert list(parameters) == ["q", "k", "v", *SIGNATURES[name]]
    assert {n: p.default for n, p in parameters.items() if n not in "qkv"} == SIGNATURES[name]


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, tw.Full()),
        ({"causal": True}, tw.Causal()),
        ({"window_size": (3, None)}, tw.Window(3, None)),
        ({"window_size": (None, 2)}, tw.Window(None, 2)),
        ({"window_size": (0, 0)}, tw.Window(0, 0)),
        ({"window_size": (3, 5), "causal": True}, tw.Window(3, 0)),
    ],
)
def test_masks_and_sinks_with_their_gradients(options, mask):
    q, k, v = random(2, 7, H, D, grad=True), random(2, 11, H_K, D, grad=True), random(2, 11, H_K, D_V, grad=True)
    sink = random(H, grad=True)
    out, lse = flash_attn_func(q, k, v, learnable_sink=sink, softcap=3.0, return_lse=True, **options)
    o, expected = tw.attention(q, k, v, mask=mask, sink=sink, score=tw.SoftCap(3.0), return_lse=True)
    assert torch.equal(out, o)
    assert torch.equal(lse, expected)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    got, wanted = (torch.autograd.grad(x, (q, k, v, sink), (do, dlse)) for x in ((out, lse), (o, expected)))
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    assert flash_attn_func(q, k, v, learnable_sink=sink, softcap=3.0, **options)[1] is None


@pytest.mark.parametrize("of_sink", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_q", [torch.float16, torch.bfloat16, torch.float32])
def test_sinks_may_have_another_type(of_q, of_sink):
    q, k, v = (random(2, n, h, D).to(of_q) for n, h in ((7, H), (11, H_K), (11, H_K)))
    sink = random(H).to(of_sink).requires_grad_()
    same = sink.detach().float().requires_grad_()
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    do = random(2, 7, H, D).to(of_q)
    cu = {"cu_seqlens_q": starts(7, 7), "cu_seqlens_k": starts(11, 11), "max_seqlen_q": 7, "max_seqlen_k": 11}
    for run in (
        lambda s: flash_attn_func(q, k, v, learnable_sink=s)[0],
        lambda s: flash_attn_varlen_func(*rows, **cu, learnable_sink=s)[0].view_as(q),
        lambda s: three.flash_attn_func(q, k, v, s_aux=s),
        lambda s: three.flash_attn_varlen_func(*rows, **cu, s_aux=s).view_as(q),
        lambda s: two.flash_attn_func(q, k, v, s_aux=s),
        lambda s: two.flash_attn_varlen_func(*rows, **cu, s_aux=s).view_as(q),
    ):
        assert torch.equal(run(sink), run(same))
        (got,), (wanted,) = (torch.autograd.grad(run(s), s, do) for s in (sink, same))
        assert got.dtype == of_sink
        assert torch.equal(got, wanted.to(of_sink))


def test_parts_of_the_keys_combine():
    q, k, v = random(2, 5, H, D), random(2, 8, H, D), random(2, 8, H, D)
    parts = [flash_attn_func(q, a, b, return_lse=True) for a, b in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True)]
    o, lse = torch.stack([o for o, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    want, want_lse = flash_attn_func(q, k, v, return_lse=True)
    for given in ((o, lse), (o.flatten(1, 2), lse.flatten(1, 2))):
        out, whole = flash_attn_combine(*given)
        assert_near(out.view_as(want), want)
        assert_near(whole.reshape(2, 5, H), want_lse.transpose(1, 2))
        place = torch.empty_like(given[0][0])
        found, none = flash_attn_combine(*given, place, return_lse=False)
        assert found is place
        assert none is None
        assert torch.equal(place, out)
    assert flash_attn_combine(o, lse, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"out_dtype must be that of out, torch\.float32, got torch\.float16; leave"):
        flash_attn_combine(o, lse, torch.empty_like(want), torch.float16)


def test_either_side_may_be_packed():
    q, k, v = random(2, 7, H, D), random(2, 11, H_K, D), random(2, 11, H_K, D_V)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    o, lse = tw.attention(q, k, v, mask=tw.Causal(), return_lse=True)
    options = {"causal": True, "return_lse": True}
    cu_q, cu_k = {"cu_seqlens_q": starts(7, 7)}, {"cu_seqlens_k": starts(11, 11)}
    for got in (
        flash_attn_varlen_func(q, k, v, **options),
        flash_attn_varlen_func(q, *rows[1:], **cu_k, max_seqlen_k=11, **options),
    ):
        assert_near(got[0], o)
        assert_near(got[1], lse)
    for got in (
        flash_attn_varlen_func(*rows, **cu_q, **cu_k, **options),
        flash_attn_varlen_func(rows[0], k, v, **cu_q, max_seqlen_q=torch.tensor(7), **options),
    ):
        assert_near(got[0], o.flatten(0, 1))
        assert_near(got[1], lse.transpose(0, 1).flatten(1))
    assert flash_attn_varlen_func(q, *rows[1:], **cu_k, causal=True)[1] is None


def test_what_is_refused_says_why():
    q = random(2, 5, H, D)
    for name in ("qv", "gather_kv_indices", "score_mod", "mask_mod", "aux_tensors", "block_sparse_tensors"):
        with pytest.raises(tw.Unsupported, match=f"flash_attn_func: {name} is not None"):
            flash_attn_func(q, q, q, **{name: q})
    for name in ("gather_kv_indices", "mask_mod"):
        with pytest.raises(tw.Unsupported, match=f"flash_attn_varlen_func: {name} is not None"):
            flash_attn_varlen_func(q, q, q, **{name: q})
    with pytest.raises(ValueError, match=r"window_size must be .*, got \(-1, -1\); pass None for an open side"):
        flash_attn_func(q, q, q, window_size=(-1, -1))
