"""flash_attn.modules.mha: its parameters' names, and every option against attention written out in plain torch."""

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat.flash_attn.layers.rotary import apply_rotary_emb_torch
from tilewise.compat.flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)

B, M, N, SIZE, H, H_K = 2, 9, 13, 32, 4, 2
D = SIZE // H


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def plain(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None = None, bias: Tensor | float = 0.0) -> Tensor:
    """Attention of q (B, M, H, D), where `shown` (…, M, N) is true; a row that sees nothing gives 0."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    S = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5 + bias
    S = S if shown is None else S.masked_fill(~shown, -torch.inf)
    return torch.einsum("bhmn,bnhd->bmhd", S.softmax(-1).nan_to_num(0.0), v)


def places(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)


def layer(**options) -> MHA:
    return MHA(SIZE, H, dtype=torch.float64, **options)


@pytest.mark.parametrize("flash", [False, True])
def test_parameters_have_that_modules_names(flash):
    def names(**options):
        return {name: tuple(t.shape) for name, t in layer(use_flash_attn=flash, **options).state_dict().items()}

    out = {"out_proj.weight": (32, 32), "out_proj.bias": (32,)}
    assert names() == {"Wqkv.weight": (96, 32), "Wqkv.bias": (96,), **out}
    assert names(num_heads_kv=2, rotary_emb_dim=4) == {"Wqkv.weight": (64, 32), "Wqkv.bias": (64,), **out}
    cross = {"Wq.weight": (32, 32), "Wkv.weight": (64, 32)}
    assert names(cross_attn=True, qkv_proj_bias=False, return_residual=True) == {**cross, **out}
    conv = {f"dwconv_{x}.{name}" for x in ("q", "kv") for name in ("weight", "bias")}
    assert names(num_heads_kv=2, dwconv=True).keys() == {"Wqkv.weight", "Wqkv.bias", *conv, *out}


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("heads", [H, H_K])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("rotary", "dwconv"), [(0, False), (4, False), (0, True)])
def test_self_attention(flash, heads, checkpointing, rotary, dwconv):
    it = layer(num_heads_kv=heads, causal=True, use_flash_attn=flash, rotary_emb_dim=rotary, dwconv=dwconv)
    it.double().checkpointing = checkpointing
    x = random(B, N, SIZE).requires_grad_()
    projected = torch.nn.functional.linear(x, it.Wqkv.weight, it.Wqkv.bias)
    if dwconv:
        convs = [it.dwconv_qkv] if heads == H else [it.dwconv_q, it.dwconv_kv]
        weight, bias = (torch.cat([getattr(c, name) for c in convs]) for name in ("weight", "bias"))
        past = torch.nn.functional.pad(projected, (0, 0, 2, 0))
        projected = sum(past[:, t : t + N] * weight[:, 0, t] for t in range(3)) + bias
    q, k, v = projected.unflatten(-1, (-1, D)).split([H, heads, heads], 2)
    if rotary:
        angles = torch.outer(torch.arange(N), 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)).double()
        q, k = (apply_rotary_emb_torch(t, angles.cos(), angles.sin()) for t in (q, k))
    i, j = places(N, N)
    expected = it.out_proj(plain(q, k, v, j <= i).flatten(2))
    got = it(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 if rotary else 1e-9)
    do = torch.randn_like(got)
    wanted = torch.autograd.grad(expected, (x, *it.parameters()), do)
    for a, b in zip(torch.autograd.grad(got, (x, *it.parameters()), do), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 if rotary else 1e-9)


@pytest.mark.parametrize("flash", [False, True])
def test_cross_attention_and_the_residual(flash):
    it = layer(cross_attn=True, return_residual=True, use_flash_attn=flash, num_heads_kv=H_K)
    x, other = random(B, M, SIZE), random(B, N, SIZE)

    def expected(x, other):
        kv = it.Wkv(other).unflatten(-1, (2, H_K, D))
        return it.out_proj(plain(it.Wq(x).unflatten(-1, (H, D)), *kv.unbind(2)).flatten(2))

    out, residual = it(x, other)
    assert residual is x
    torch.testing.assert_close(out, expected(x, other))
    torch.testing.assert_close(it(x)[0], expected(x, x))
    torch.testing.assert_close(it(x, mixer_subset=slice(0, 1))[0], expected(x[:, :1], x))


def test_packed_sequences_windows_and_alibi():
    it = layer(causal=True, use_flash_attn=True, use_alibi=True, window_size=(3, 0))
    x, cu = random(N, SIZE), torch.tensor([0, 5, N], dtype=torch.int32)
    got = it(x, cu_seqlens=cu, max_seqlen=8)
    slopes = torch.tensor([0.25, 0.0625, 2**-6, 2**-8], dtype=torch.float64)
    for rows in (slice(0, 5), slice(5, N)):
        q, k, v = it.Wqkv(x[None, rows]).unflatten(-1, (3, H, D)).unbind(2)
        i, j = places(q.shape[1], q.shape[1])
        bias = -slopes[:, None, None] * (i - j).abs()
        expected = it.out_proj(plain(q, k, v, (j <= i) & (i - j <= 3), bias).flatten(2))
        torch.testing.assert_close(got[rows], expected[0])
        torch.testing.assert_close(it(x[None, rows]), expected)


def test_slopes_are_the_papers_and_between_them():
    assert get_alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert get_alibi_slopes(12) == [2.0**-n for n in range(1, 9)] + [2.0 ** (-n / 2) for n in (1, 3, 5, 7)]


@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_keys(causal):
    keep = torch.arange(N) < torch.tensor([[10], [13]])
    q, kv = random(B, M, H, D), random(B, N, 2, H_K, D)
    i, j = torch.arange(M)[:, None], torch.arange(N)
    shown = keep[:, None, None, :] & ((j <= i + keep.sum(1)[:, None, None, None] - M) if causal else True)
    got = CrossAttention(causal)(q, kv, key_padding_mask=keep)
    torch.testing.assert_close(got, plain(q, *kv.unbind(2), shown))
    qkv = random(B, N, 3, H, D)
    i, j = places(N, N)
    got = SelfAttention()(qkv, causal, keep)
    torch.testing.assert_close(got, plain(*qkv.unbind(2), keep[:, None, None, :] & ((j <= i) if causal else True)))
    it = layer(causal=causal)
    x = random(B, N, SIZE)
    assert it(x, key_padding_mask=keep).shape == x.shape


def test_dropout_is_for_training_alone():
    q, kv = random(B, M, H, D), random(B, N, 2, H, D)
    qkv = torch.cat([q, *kv[:, :M].unbind(2)], -1).unflatten(-1, (3, D)).transpose(2, 3)
    for it, given in (
        (FlashSelfAttention(attention_dropout=0.5), (qkv,)),
        (FlashCrossAttention(attention_dropout=0.5), (q, kv)),
        (CrossAttention(attention_dropout=0.5), (q, kv)),
    ):
        assert not torch.equal(it(*given), it(*given))
        it.eval()
        assert torch.equal(it(*given), it(*given))


def test_options_of_the_inner_layers_have_that_modules_order():
    qkv, slopes = random(B, N, 3, H, D), torch.rand(H)
    given = {"causal": True, "softmax_scale": 0.3, "window_size": (3, 0), "alibi_slopes": slopes}
    expected = FlashSelfAttention(True, 0.3, 0.0, (3, 0), slopes, True)(qkv)
    assert torch.equal(FlashSelfAttention(**given)(qkv), expected)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    assert torch.equal(FlashCrossAttention(True, 0.3, 0.0, slopes, (3, 0), True)(q, kv), expected)
    assert torch.equal(FlashCrossAttention(**given)(q, kv), expected)


def test_packed_inner_layers():
    q, kv = random(N, H, D), random(N, 2, H, D)
    cu = torch.tensor([0, 5, N], dtype=torch.int32)
    got = FlashCrossAttention(causal=True)(q, kv, None, cu, 8, cu, 8)
    joint = FlashSelfAttention()(torch.stack([q, *kv.unbind(1)], 1), True, cu, 8)
    torch.testing.assert_close(joint, got)
    for rows in (slice(0, 5), slice(5, N)):
        i, j = places(*[rows.stop - rows.start] * 2)
        torch.testing.assert_close(got[rows], plain(q[None, rows], *kv[None, rows].unbind(2), j <= i)[0])


def test_what_does_not_go_together_says_so():
    x, cu = random(B, N, SIZE), torch.tensor([0, N], dtype=torch.int32)
    for options, says in (
        ({"num_heads_kv": 3}, "must each divide the one before"),
        ({"use_alibi": True}, "use_flash_attn must be True"),
        ({"window_size": (3, 0)}, "use_flash_attn must be True"),
        ({"cross_attn": True, "rotary_emb_dim": 4}, "rotary_emb_dim must be 0"),
    ):
        with pytest.raises(ValueError, match=says):
            layer(**options)
    with pytest.raises(ValueError, match="key_padding_mask must be None with use_flash_attn=True"):
        layer(use_flash_attn=True)(x, key_padding_mask=x[..., 0] > 0)
    with pytest.raises(ValueError, match="cu_seqlens must be None with use_flash_attn=False"):
        layer()(x[0], cu_seqlens=cu, max_seqlen=N)
    with pytest.raises(ValueError, match="cu_seqlens must be None with dwconv or rotary_emb_dim"):
        layer(use_flash_attn=True, dwconv=True)(x[0], cu_seqlens=cu, max_seqlen=N)
    with pytest.raises(ValueError, match="max_seqlen must be an int with cu_seqlens"):
        layer(use_flash_attn=True)(x[0], cu_seqlens=cu)
    with pytest.raises(tw.Unsupported, match="inference_params is not None"):
        layer()(x, inference_params=object())
