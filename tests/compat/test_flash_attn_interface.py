"""FlashAttention-3's flash_attn_interface: its signatures, its chunks, and what it refuses."""

import inspect

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat import flash_attn_interface as interface
from tilewise.compat.flash_attn import flash_attn_func as version_2
from tilewise.compat.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, H_K, D, D_V = 4, 2, 16, 8
DESCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
SCALE = {"softmax_scale": None, "causal": False}
WINDOW = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
LAST = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False}
SIGNATURES = {
    "flash_attn_func": ("q k v", {**SCALE, "qv": None, **DESCALES, **WINDOW, **LAST, "s_aux": None}),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {"seqused_q": None, "seqused_k": None, **SCALE, "qv": None, **DESCALES, **WINDOW, **LAST, "s_aux": None},
    ),
    "flash_attn_qkvpacked_func": (
        "qkv",
        {**SCALE, **DESCALES, **WINDOW, "deterministic": False, "num_heads_q": None, "sm_margin": 0}
        | {"return_attn_probs": False},
    ),
    "flash_attn_combine": ("out_partial lse_partial", {"out": None, "out_dtype": None}),
}


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    first, rest = SIGNATURES[name]
    parameters = inspect.signature(getattr(interface, name)).parameters
    assert list(parameters) == [*first.split(), *rest]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == rest


def test_the_fourth_argument_is_the_scale():
    q, k, v = random(2, 7, H, D), random(2, 11, H_K, D), random(2, 11, H_K, D_V)
    out, lse = flash_attn_func(q, k, v, 0.2, True, window_size=(4, 2), softcap=3.0, return_attn_probs=True)
    o, expected = tw.attention(q, k, v, scale=0.2, mask=tw.Window(4, 0), score=tw.SoftCap(3.0), return_lse=True)
    assert torch.equal(out, o)
    assert torch.equal(lse, expected)
    hints = flash_attn_func(q, k, v, 0.2, True, num_splits=4, pack_gqa=True, sm_margin=8)
    assert torch.equal(hints, flash_attn_func(q, k, v, 0.2, True))


def test_packed_projections():
    qkv = random(2, 9, H + 2 * H_K, D)
    q, k, v = qkv.split([H, H_K, H_K], 2)
    out = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=H)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    joint = torch.stack([q, q + 1, q - 1], 2)
    for options in ({}, {"attention_chunk": 4}):
        out, lse = flash_attn_qkvpacked_func(joint, causal=True, return_attn_probs=True, **options)
        expected = flash_attn_func(*joint.unbind(2), causal=True, return_attn_probs=True, **options)
        assert_near(out, expected[0])
        assert_near(lse, expected[1])
    with pytest.raises(ValueError, match="num_heads_q must leave an even number of the 8 heads"):
        flash_attn_qkvpacked_func(qkv, num_heads_q=3)


def same_chunk(M: int, N: int, chunk: int, causal: bool, left: int | None) -> tw.Mask:
    """The mask written out."""
    i, j = torch.arange(M, device=DEVICE)[:, None] + N - M, torch.arange(N, device=DEVICE)
    seen = torch.div(i, chunk, rounding_mode="floor") == j // chunk
    seen = seen & (j <= i) if causal else seen
    return tw.Dense(seen if left is None else seen & (j >= i - left))


@pytest.mark.parametrize(("causal", "left"), [(True, None), (False, None), (True, 2)])
@pytest.mark.parametrize(("M", "N", "chunk"), [(12, 12, 4), (13, 13, 5), (3, 11, 4), (11, 3, 4), (9, 9, 20), (5, 0, 4)])
def test_chunks(M, N, chunk, causal, left):
    q, k, v = random(2, M, H, D, grad=True), random(2, N, H_K, D, grad=True), random(2, N, H_K, D_V, grad=True)
    options = {"causal": causal, "window_size": (-1 if left is None else left, 0 if causal else -1)}
    options |= {"attention_chunk": chunk, "return_attn_probs": True}
    o, expected = tw.attention(q, k, v, mask=same_chunk(M, N, chunk, causal, left), return_lse=True)
    out, lse = flash_attn_func(q, k, v, **options)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    packed, packed_lse = flash_attn_varlen_func(*rows, starts((M, M)), starts((N, N)), M, N, **options)
    assert_near(out, o)
    assert_near(lse, expected)
    assert_near(packed, o.flatten(0, 1))
    assert_near(packed_lse, expected.transpose(0, 1).flatten(1))
    do = torch.randn_like(o)
    wanted = torch.autograd.grad(o, (q, k, v), do)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), do), wanted, strict=True):
        assert_near(a, b)


def test_chunks_of_packed_sequences():
    lengths, longest = (6, 0, 13, 1), 13
    q, k, v = random(22, H, D), random(22, H_K, D), random(22, H_K, D)  # two rows of no sequence
    cu = starts(lengths)
    s_aux = random(H)
    options = {"causal": True, "attention_chunk": 4, "s_aux": s_aux}
    out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu, cu.clone(), longest, longest, **options))
    for first, length in zip(cu.tolist(), lengths, strict=False):
        rows = slice(first, first + length)
        mask = same_chunk(length, length, 4, True, None)
        assert_near(out[rows], tw.attention(q[None, rows], k[None, rows], v[None, rows], mask=mask, sink=s_aux)[0])
    assert not out[20:].any()


def test_parts_of_the_keys_combine():
    q, k, v = random(2, 5, H, D), random(2, 8, H, D), random(2, 8, H, D)
    parts = [
        flash_attn_func(q, a, b, return_attn_probs=True) for a, b in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True)
    ]
    stacked = [torch.stack(part) for part in zip(*parts, strict=True)]
    place = torch.empty_like(q)
    out, lse = flash_attn_combine(stacked[0], stacked[1].transpose(2, 3), place)
    expected, whole = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out is place
    assert_near(out, expected)
    assert_near(lse.transpose(1, 2), whole)
    assert (
        flash_attn_combine(stacked[0], stacked[1].transpose(2, 3), out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    )


@pytest.mark.parametrize("packed", [False, True])
def test_the_functions_below(packed):
    q, k, v = random(2, 7, H, D, grad=True), random(2, 7, H_K, D, grad=True), random(2, 7, H_K, D, grad=True)
    expected, _, _ = version_2(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)
    do = torch.randn_like(q)
    wanted = torch.autograd.grad(expected, (q, k, v), do)
    cu = starts((7, 7))
    layout = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7} if packed else {}
    shaped = [t.detach().flatten(0, 1) if packed else t.detach() for t in (do, q, k, v)]
    given = {"window_size_left": 3, "window_size_right": 0, **layout}
    place = torch.empty_like(shaped[1])
    out, lse, *rest = interface._flash_attn_forward(*shaped[1:], out_=place, causal=True, **given)
    assert out is place
    assert [t.numel() for t in rest] == [0, 0]
    assert_near(out.view_as(expected), expected)
    written = [torch.empty_like(t) for t in shaped[1:]]
    grads = dict(zip(("dq", "dk", "dv"), written, strict=True))
    softmax_d = interface._flash_attn_backward(*shaped, out, lse, is_causal=True, **given, **grads)
    assert softmax_d.shape == lse.shape
    for a, b in zip(written, wanted, strict=True):
        assert_near(a.view_as(b), b)


def test_scheduler_metadata_is_a_hint_that_is_taken():
    q, cache, used = random(2, 1, H, D), random(2, 20, H_K, D), torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    metadata = get_scheduler_metadata(2, 1, 20, H, H_K, D, used, qkv_dtype=q.dtype, causal=True)
    assert (metadata.dtype, metadata.device) == (torch.int32, used.device)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, causal=True, scheduler_metadata=metadata)
    assert torch.equal(out, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, causal=True))


def test_what_is_refused_says_why():
    q, cu = random(1, 5, H, D), starts((5,))
    with pytest.raises(tw.Unsupported, match="flash_attn_func: qv is not None, but no kernel here reads it"):
        flash_attn_func(q, q, q, qv=q)
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(tw.Unsupported, match=f"{name} is not None, but parts of sequences"):
            interface._flash_attn_forward(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **{name: cu[1:]})
    with pytest.raises(tw.Unsupported, match="page_table is not None, but this function takes no"):
        interface._flash_attn_forward(q, q, q, page_table=cu)
    with pytest.raises(tw.Unsupported, match="flash_attn_with_kvcache: qv is not None"):
        flash_attn_with_kvcache(q, q, q, cache_seqlens=5, qv=q)


def in_e4m3(*shape: int, scales: tuple[int, ...] = (2, H_K)) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor in e4m3, its descale, and what they stand for in bf16."""
    x, scale = random(*shape).to(torch.float8_e4m3fn), torch.rand(scales, device=DEVICE) + 0.5
    each = scale.repeat_interleave(shape[-2] // H_K, 1)[:, None, :, None]
    return x, scale, (x.float() * each).bfloat16()


def test_descales_are_the_scales_of_quantized_tensors():
    (q, q_descale, q_16), (k, k_descale, k_16), (v, v_descale, v_16) = (
        in_e4m3(2, n, h, 16) for n, h in ((20, H), (30, H_K), (30, H_K))
    )
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **descales)
    eight = [tw.Quantized(*pair) for pair in ((q, q_descale), (k, k_descale), (v, v_descale))]
    o, expected = tw.attention(*eight, mask=tw.Causal(), precision="fp8", return_lse=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, o)
    assert torch.equal(lse, expected)
    near = flash_attn_func(q_16, k_16, v_16, causal=True)
    assert (out - near).float().square().mean().sqrt() <= 0.04 * near.float().square().mean().sqrt()
    cu_q, cu_k = starts((20, 20)), starts((30, 30))
    packed = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 20, 30, causal=True, **descales
    )
    assert torch.equal(packed.view_as(out), out)
    assert torch.equal(interface._flash_attn_forward(q, k, v, causal=True, **descales)[0], out)
    ones = {name: torch.ones_like(scale) for name, scale in descales.items()}
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, **ones))
    joint = torch.stack([k, k, v], 2)
    assert torch.equal(flash_attn_qkvpacked_func(joint), flash_attn_func(k, k, v))
    with pytest.raises(tw.Unsupported, match="attention_chunk is > 0, but q is in e4m3"):
        flash_attn_func(q, k, v, attention_chunk=4)


def test_descales_of_a_cache():
    q, q_descale, q_16 = in_e4m3(2, 3, H, 16)
    k, k_descale, k_16 = in_e4m3(2, 30, H_K, 16)
    v, v_descale, v_16 = in_e4m3(2, 30, H_K, 16)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=DEVICE)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **descales)
    near = flash_attn_with_kvcache(q_16, k_16, v_16, cache_seqlens=lengths, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, near, rtol=2e-2, atol=2e-2)
    new = random(2, 3, H_K, 16).to(torch.float8_e4m3fn)
    flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, causal=True, **descales)
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(k[b, length : length + 3].view(torch.uint8), new[b].view(torch.uint8))
    used = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts((3, 3)), starts((30, 30)), 3, 30,
        seqused_k=lengths + 3, causal=True, **descales,
    )  # fmt: skip
    torch.testing.assert_close(
        used.view(2, 3, H, 16),
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths + 3, causal=True, **descales),
    )
    angles = {"rotary_cos": random(40, 8), "rotary_sin": random(40, 8)}
    with pytest.raises(tw.Unsupported, match="rotary_cos is not None, but q is in e4m3"):
        flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, **angles, **descales)
