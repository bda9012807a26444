"""tilewise.compat.flash_attn.layers.rotary: what it writes in place, and autograd through it."""

import pytest
import torch
from torch import Tensor

from tilewise.compat.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

B, S, H, D, R = 2, 5, 3, 10, 8


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tables(shift: float = 0.0) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(20.0, dtype=torch.float64), torch.tensor([1.0, 0.3, 0.1, 0.03])) + shift
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offset: int = 0) -> Tensor:
    """Plain, differentiable torch for x (B, S, H, D)."""
    c, s = (t[offset : offset + x.shape[1], None, :] for t in (cos, sin))
    n = 2 * cos.shape[1]
    if interleaved:
        a, b = x[..., 0:n:2], x[..., 1:n:2]
        y = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = x[..., : n // 2], x[..., n // 2 : n]
        y = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([y, x[..., n:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_copy_leaves_x_alone(interleaved):
    x, (cos, sin) = random(B, S, H, D), tables()
    before = x.clone()
    y = apply_rotary_emb(x, cos, sin, interleaved, False, 2)
    assert torch.equal(x, before)
    torch.testing.assert_close(y, turned(x, cos, sin, interleaved, 2))
    assert apply_rotary_emb_func is apply_rotary_emb


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_in_place_writes_x_and_differentiates(interleaved, view):
    leaf, (cos, sin) = random(B, S, H, D).requires_grad_(), tables()
    dy = random(B, S, H, D)
    (expected,) = torch.autograd.grad(turned(leaf * 2.0, cos, sin, interleaved), leaf, dy)
    x = leaf * 2.0
    target = torch.stack([x, x], 2)[:, :, 1] if view else x
    address = target.data_ptr()
    y = apply_rotary_emb(target, cos, sin, interleaved=interleaved, inplace=True)
    assert y is target
    assert y.data_ptr() == address
    torch.testing.assert_close(y, turned(leaf * 2.0, cos, sin, interleaved))
    (dx,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(dx, expected)


def test_a_leaf_that_needs_a_gradient_is_not_written():
    x, (cos, sin) = random(B, S, H, D).requires_grad_(), tables()
    with pytest.raises(RuntimeError, match="leaf"):
        apply_rotary_emb(x, cos, sin, inplace=True)


def test_packed_and_offsets():
    x, (cos, sin) = random(7, H, D), tables()
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    y = apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([4, 9]), cu_seqlens=cu, max_seqlen=4)
    torch.testing.assert_close(y[:3], turned(x[None, :3], cos, sin, offset=4)[0])
    torch.testing.assert_close(y[3:], turned(x[None, 3:], cos, sin, offset=9)[0])
    apply_rotary_emb(x, cos, sin, inplace=True, seqlen_offsets=torch.tensor([4, 9]), cu_seqlens=cu)
    assert torch.equal(x, y)


@pytest.mark.parametrize("own", ["none", "cos_k", "both"])
@pytest.mark.parametrize("H_k", [None, 1])
def test_qkv_in_place(own, H_k):
    cos, sin = tables()
    other = tables(0.5)
    cos_k, sin_k = {"none": (None, None), "cos_k": (other[0], None), "both": other}[own]
    leaf = (random(B, S, 3, H, D) if H_k is None else random(B, S, H + 2 * H_k, D)).requires_grad_()
    heads = (1, 1, 1) if H_k is None else (H, H_k, H_k)

    def plain(leaf: Tensor) -> Tensor:
        q, k, v = leaf.split(heads, 2)
        for_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        if H_k is not None:
            return torch.cat([turned(q, cos, sin), turned(k, *for_k), v], 2)
        return torch.stack([turned(q[:, :, 0], cos, sin), turned(k[:, :, 0], *for_k), v[:, :, 0]], 2)

    x = leaf * 1.0
    y = apply_rotary_emb_qkv_(x, cos, sin, cos_k, sin_k, num_heads_q=None if H_k is None else H)
    assert y is x
    torch.testing.assert_close(y, plain(leaf))
    dy = random(*leaf.shape)
    got, expected = (torch.autograd.grad(out, leaf, dy)[0] for out in (y, plain(leaf)))
    torch.testing.assert_close(got, expected)


def test_kv_in_place():
    cos, sin = tables()
    leaf = random(B, S, 2, H, D).requires_grad_()
    x = leaf * 1.0
    y = apply_rotary_emb_kv_(x, cos, sin, True, 3)
    assert y is x
    expected = torch.stack([turned(leaf[:, :, 0], cos, sin, True, 3), leaf[:, :, 1]], 2)
    torch.testing.assert_close(y, expected)
    dy = random(*leaf.shape)
    got, wanted = (torch.autograd.grad(out, leaf, dy)[0] for out in (y, expected))
    torch.testing.assert_close(got, wanted)


def test_wrong_shapes():
    cos, sin = tables()
    for wrong, options, message in (
        (random(B, S, D), {}, r"qkv must have shape \(B, S, 3, H, D\), or .*got \(2, 5, 10\)"),
        (random(B, S, 2, H, D), {}, "qkv must have shape"),
        (random(B, S, 5, D), {}, "num_heads_q must leave an even number of the 5 heads.*got None"),
        (random(B, S, 5, D), {"num_heads_q": 2}, "got 2"),
        (random(B, S, 5, D), {"num_heads_q": 5}, "got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rotary_emb_qkv_(wrong, cos, sin, **options)
    with pytest.raises(ValueError, match=r"kv must have shape \(B, S, 2, H_k, D\), got \(2, 5, 3, 3, 10\)"):
        apply_rotary_emb_kv_(random(B, S, 3, H, D), cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer(interleaved, dtype):
    layer = RotaryEmbedding(R, base=100.0, interleaved=interleaved).to(dtype)
    angle = torch.outer(torch.arange(9.0).double(), 100.0 ** (-torch.arange(0, R, 2).double() / R))
    qkv = torch.randn(B, S, 3, H, D).to(dtype)
    before = qkv.double()
    y = layer(qkv, seqlen_offset=4)
    assert y is qkv
    tolerance = dict.fromkeys(("rtol", "atol"), 8 * torch.finfo(dtype).eps)  # angles are fp32, as large as 9
    for n in (0, 1):
        expected = turned(before[:, :, n], angle.cos(), angle.sin(), interleaved, 4)
        torch.testing.assert_close(y[:, :, n].double(), expected, **tolerance)
    assert torch.equal(y[:, :, 2].double(), before[:, :, 2])


def test_layer_on_q_and_kv():
    layer = RotaryEmbedding(R)
    q, kv = torch.randn(B, S, H, D), torch.randn(B, S, 2, 1, D)
    together = torch.cat([q, kv[:, :, 0], kv[:, :, 1]], 2)
    offsets = torch.tensor([0, 6])
    with pytest.raises(ValueError, match="max_seqlen must be an int if seqlen_offset is a tensor"):
        layer(together, seqlen_offset=offsets, num_heads_q=H)
    layer(together, seqlen_offset=offsets, max_seqlen=16, num_heads_q=H)
    y, y_kv = layer(q, kv, seqlen_offset=offsets, max_seqlen=16)
    assert y is q
    assert y_kv is kv
    assert torch.equal(torch.cat([q, kv[:, :, 0], kv[:, :, 1]], 2), together)


def test_layer_tables_are_kept_and_grow():
    layer = RotaryEmbedding(R)
    with torch.inference_mode():
        layer(torch.randn(1, 4, 3, H, D))
    made_in_inference = layer._tables
    x = torch.randn(1, 4, 3, H, D, requires_grad=True)
    layer(x * 1.0).sum().backward()
    assert x.grad is not None
    kept = layer._tables
    assert kept is not made_in_inference
    layer(torch.randn(1, 3, 3, H, D))
    assert layer._tables is kept
    layer(torch.randn(1, 6, 3, H, D))
    assert layer._tables[0].shape == (6, R // 2)
    assert "inv_freq" not in layer.state_dict()


def test_xpos_decays_with_distance_alone():
    layer = RotaryEmbedding(R, scale_base=4.0).double()
    x = random(1, 1, 1, 1, R).expand(1, 12, 3, 1, R).clone()
    q, k, _ = layer(x).unbind(2)
    scores = torch.einsum("bmhd,bnhd->mn", q, k)
    torch.testing.assert_close(scores[3, 1], scores[9, 7], rtol=1e-5, atol=1e-5)
    diagonal = scores.diagonal()
    torch.testing.assert_close(diagonal, diagonal[:1].expand(12), rtol=1e-5, atol=1e-5)
    norms = [q[0, m].norm() * k[0, n].norm() for m, n in ((5, 5), (8, 5), (11, 5))]
    assert norms[0] > norms[1] > norms[2]


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_plain_torch_and_in_the_kernels_order(interleaved):
    x, angles = torch.randn(2, 5, 3, 16), torch.rand(5, 6)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_emb(x, cos, sin, interleaved)
    torch.testing.assert_close(apply_rotary_emb_torch(x, cos, sin, interleaved), expected)
    batched = [t.expand(2, 5, 6) for t in (cos, sin)]
    torch.testing.assert_close(apply_rotary_emb_torch(x, *batched, interleaved), expected)
    assert torch.equal(apply_rotary(x, cos, sin, 0, None, None, interleaved), expected)
    torch.testing.assert_close(apply_rotary(expected, cos, sin, interleaved=interleaved, conjugate=True), x)
    assert torch.equal(apply_rotary(x, cos, sin, interleaved=interleaved, inplace=True), expected)
    assert torch.equal(x, expected)
    torch.testing.assert_close(rotate_half(rotate_half(x, interleaved), interleaved), -x)
