"""8-bit products: codes bit by bit in both forms, their error, what is saved, gradients, and what is not finite."""

import os

import pytest
import torch

import tilewise as tw
from tilewise import quantize, reference
from tilewise.check import check_arguments, describe

bf16, fp16 = torch.bfloat16, torch.float16
BOTH = pytest.mark.parametrize("precision", ["int8", "fp8"])


def call(q, k, v, precision, mask=None, layout=None):
    """The operands and the problem of a call."""
    mask = tw.Full() if mask is None else mask
    x, recipe, longest = check_arguments(q, k, v, mask, (), None, None, 0.0, layout, precision, False, None)
    return describe(x, recipe, longest), x


def paper(n, d, seed):
    """FlashAttention-3's draw: N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    g = torch.Generator().manual_seed(seed)

    def one():
        return torch.randn(1, n, 1, d, generator=g) + 10 * torch.randn(1, n, 1, d, generator=g) * (
            torch.rand(1, n, 1, d, generator=g) < 0.001
        )

    return tuple(one().to(fp16) for _ in range(3))


def case(name):
    """Operands with a mean in K, and a layout or a mask."""
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g)

    if name == "packed":
        ends = torch.tensor([[0, 30, 30, 130], [0, 140, 150, 300]], dtype=torch.int32)
        q, k, v = draw(140, 2, 64), draw(310, 1, 64) + draw(64), draw(310, 1, 32)
        return (q.to(bf16), k.to(bf16), v.to(bf16)), {"layout": tw.Varlen(*ends)}
    B, M, N, H, H_k, D, D_v, kind = {
        "small": (2, 70, 150, 2, 1, 16, 16, bf16),
        "fp16": (1, 70, 150, 2, 2, 40, 64, fp16),
        "padded": (2, 70, 300, 4, 2, 128, 96, bf16),
        "not finite": (2, 70, 150, 2, 1, 64, 64, bf16),
    }[name]
    q, k, v = (t.to(kind) for t in (draw(B, M, H, D), draw(B, N, H_k, D) + 3 * draw(D), draw(B, N, H_k, D_v)))
    if name == "not finite":
        q[0, 5], k[0, 3, 0, 0], v[0, 2, 0, 1], v[0, 3, 0, 2] = torch.nan, torch.inf, torch.nan, -torch.inf
    return (q, k, v), {"mask": tw.Padding(torch.tensor([100, 300]))} if name == "padded" else {}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["small", "fp16", "padded", "not finite", "packed"])
@BOTH
def test_kernels_compute_the_codes_of_plain_torch_bit_by_bit(name, precision):
    launches = pytest.importorskip("tilewise.host.quantize").quantize_launches
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands, options = case(name)
    options = {key: value.to(device) for key, value in options.items()}
    p, x = call(*(t.to(device) for t in operands), precision, **options)
    want, got = quantize.quantize(p, x), quantize.empty_codes(p, torch.device(device))
    for t in got.present():
        t.view(torch.int8).zero_()
    for launch in launches(p, x, got, {}):
        launch.run()
    for field, a, b in zip(quantize.Codes._fields, want, got, strict=True):
        if field == "q_shift":
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
        elif a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


@pytest.mark.parametrize(("precision", "most"), [("int8", 1.7e-3), ("fp8", 6e-3)])
def test_errors_on_the_papers_draw(precision, most):
    """FlashAttention-3 publishes 9.1e-3 for its fp8."""
    for seed in range(3):
        q, k, v = paper(4096, 128, seed)
        rows = q[:, ::16]
        o = tw.attention(rows, k, v, precision=precision)
        true = reference.attention(*(t.double() for t in (rows, k, v)))[0]
        assert (o.double() - true).square().mean().sqrt() <= most


@BOTH
def test_long_rows_keep_the_length_of_o(precision):
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 8, 1, 128, generator=g), torch.randn(1, 1 << 17, 1, 128, generator=g)
    v = torch.randn(1, 1 << 17, 1, 128, generator=g) + torch.randn(128, generator=g)
    q, k, v = q.to(bf16), k.to(bf16), v.to(bf16)
    true = reference.attention(*(t.double() for t in (q, k, v)))[0]
    o = tw.attention(q, k, v, precision=precision).double()
    assert abs((o * true).sum() / true.square().sum() - 1) <= 2e-3


@BOTH
def test_zeros_give_zeros_and_nan_gives_nan(precision):
    zeros = torch.zeros(1, 130, 1, 64, dtype=bf16)
    o, lse = tw.attention(zeros, zeros, zeros, precision=precision, return_lse=True)
    assert not o.any()
    torch.testing.assert_close(lse, torch.full_like(lse, 130.0).log())
    q, k, v = (torch.randn(1, 130, 1, 64, dtype=bf16) for _ in range(3))
    q[0, 7, 0, 3] = torch.nan
    o = tw.attention(q, k, v, precision=precision)
    assert o[0, 7].isnan().all()
    assert o[0, torch.arange(130) != 7].isfinite().all()
    for t in (k, v):
        t[0, 129, 0, 5] = torch.inf
        exact = tw.attention(q, k, v, mask=tw.Causal())
        got = tw.attention(q, k, v, mask=tw.Causal(), precision=precision)
        assert not got[~exact.isfinite()].isfinite().any()
        t[0, 129, 0, 5] = 0.0


@BOTH
def test_padding_and_other_sequences_enter_no_scale(precision):
    q, k, v = (torch.randn(1, 60, 2, 64, dtype=bf16) for _ in range(3))
    alone = tw.attention(q, k, v, precision=precision, mask=tw.Causal())[0]
    huge = torch.full((70, 2, 64), 1e4, dtype=bf16)
    packed = [torch.cat([huge, t[0], huge]) for t in (q, k, v)]
    cu = torch.tensor([0, 70, 130, 200], dtype=torch.int32)
    o = tw.attention(*packed, precision=precision, mask=tw.Causal(), layout=tw.Varlen(cu, cu))
    assert torch.equal(o[70:130], alone)
    long = [torch.cat([t, huge[None]], 1) for t in (k, v)]
    o = tw.attention(q, *long, precision=precision, mask=tw.Padding(torch.tensor([60])))
    assert torch.equal(o, tw.attention(q, k, v, precision=precision))


def test_codes_halve_what_is_saved():
    def saved(precision):
        q, k, v = (torch.randn(1, 1024, 4, 128, dtype=bf16, requires_grad=True) for _ in range(3))
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (storages.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}), t)[1],
            lambda t: t,
        ):
            o, lse = tw.attention(q, k, v, precision=precision, return_lse=True)
        for t in (o, lse):
            storages.pop(t.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    assert saved("fp8") <= 0.55 * saved(None)
    assert saved("int8") <= 0.72 * saved(None)


@BOTH
def test_gradients_are_of_what_the_forward_saw(precision):
    """With the original tensors and the 8-bit lse, P no longer sums to 1: on peaked logits that is far worse."""
    g = torch.Generator().manual_seed(5)
    low = torch.randn(512, 8, generator=g) @ torch.randn(8, 128, generator=g)
    q, k = ((torch.randn(512, 128, generator=g) * 0.5 + low.roll(n, 0)).view(1, 512, 1, 128) for n in (3, 0))
    v, do = (torch.randn(1, 512, 1, 128, generator=g) for _ in range(2))
    q, k, v, do = (t.to(bf16) for t in (q, k, v, do))
    true = reference.gradients(*(t.double() for t in (q, k, v, do)))[:3]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = tw.attention(*leaves, precision=precision, return_lse=True)
    seen = torch.autograd.grad(o, leaves, do)
    careless = tw.attention_backward(do, q, k, v, o.detach(), lse.detach())

    def errors(found):
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, true, strict=True)]

    for ours, theirs in zip(errors(seen), errors(careless), strict=True):
        assert ours < 0.12
        assert ours < theirs
    again = tw.attention_backward(do, q, k, v, o.detach(), lse.detach(), precision=precision)
    for a, b in zip(seen, again, strict=True):
        assert torch.equal(a, b), "a backward without saved codes quantizes again"


def test_explain_says_approximate():
    q = torch.randn(1, 100, 1, 64, dtype=bf16)
    told = tw.explain(q, q, q, precision="fp8")
    assert "approximate: int8 Q K^T, e4m3 P V; not faster than 16 bits with 100 keys" in told.tiles
    counted = 128 * 64 + 128 * 64 * 2 + 128 * 4 * 2 + 4 * 2 + 2 * 64 * 4  # q, k and v, their scales, mean and balance
    assert f"; {counted} bytes of codes and scales" in told.tiles


@BOTH
@pytest.mark.parametrize("name", ["padded", "packed"])
def test_mean_and_balance_may_be_given(name, precision):
    operands, options = case(name)
    p, x = call(*operands, precision, **options)
    own = quantize.quantize(p, x)
    size = operands[0].shape[-1]
    given = tw.EightBits(precision, own.mean[..., :size], own.balance[..., :size])
    same = tw.attention(*operands, precision=given, **options)
    assert torch.equal(same, tw.attention(*operands, precision=precision, **options))
    of_layer = tw.EightBits(precision, *(t[0] * 1.0 for t in (given.mean, given.balance)))
    o, lse = tw.attention(*operands, precision=of_layer, return_lse=True, **options)
    exact, exact_lse = tw.attention(*operands, return_lse=True, **options)
    seen = exact_lse.isfinite()
    torch.testing.assert_close(lse[seen], exact_lse[seen], rtol=0, atol=0.2)
    assert (o - exact).float().square().mean().sqrt() <= 0.05 * exact.float().square().mean().sqrt()


def test_a_layers_own_mean_and_balance_serve_gradients_and_vmap():
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(3, 2, 40, 2, 32, generator=g, dtype=bf16) for _ in range(3))
    k = k + 8 * torch.randn(32, generator=g).to(bf16)
    given = tw.EightBits.of("int8", q[0], k[0])
    assert given.mean.shape == given.balance.shape == (2, 32)
    each = torch.stack([tw.attention(*(t[n] for t in (q, k, v)), precision=given) for n in range(3)])
    assert torch.equal(torch.vmap(lambda *x: tw.attention(*x, precision=given))(q, k, v), each)
    leaves = [t[0].detach().requires_grad_() for t in (q, k, v)]
    do = torch.randn(2, 40, 2, 32, generator=g).to(bf16)
    o, lse = tw.attention(*leaves, precision=given, return_lse=True)
    grads = torch.autograd.grad(o, leaves, do)
    again = tw.attention_backward(do, *(t[0] for t in (q, k, v)), o.detach(), lse.detach(), precision=given)
    true = reference.gradients(*(t.double() for t in (*[t[0] for t in (q, k, v)], do)))[:3]
    for a, b, c in zip(grads, again, true, strict=True):
        assert torch.equal(a, b)
        assert (a - c).norm() <= 0.05 * c.norm()


def test_given_numbers_are_checked():
    q = torch.randn(1, 8, 2, 64, dtype=bf16)
    mean, ones = torch.zeros(2, 64), torch.ones(2, 64)
    with pytest.raises(ValueError, match="name must be int8 or fp8, got 'fp4'"):
        tw.EightBits("fp4", mean, ones)
    with pytest.raises(TypeError, match="balance must be a tensor of fp32, got torch"):
        tw.EightBits("fp8", mean, ones.to(bf16))
    with pytest.raises(ValueError, match="balance must hold powers of two"):
        tw.attention(q, q, q, precision=tw.EightBits("fp8", mean, 3 * ones))
    with pytest.raises(ValueError, match=r"mean must have shape \(2, 64\) or \(1, 2, 64\), got \(1, 3, 64\)"):
        tw.attention(q, q, q, precision=tw.EightBits("fp8", torch.zeros(3, 64), torch.ones(3, 64)))
    with pytest.raises(ValueError, match="mean must have no gradient"):
        tw.EightBits("fp8", mean.requires_grad_(), ones)


def test_wrong_types_and_refusals():
    q = torch.randn(1, 8, 1, 64)
    with pytest.raises(ValueError, match="convert q, k and v to fp16 or bf16 for 8-bit products"):
        tw.attention(q, q, q, precision="int8")
    with pytest.raises(tw.Unsupported, match="has no dropout; use precision='int8'"):
        tw.attention(q.to(bf16), q.to(bf16), q.to(bf16), precision="fp8", dropout=0.1)
    wide = torch.randn(1, 8, 1, 300, dtype=bf16)
    with pytest.raises(tw.Unsupported, match="takes head sizes up to 256, got 300"):
        tw.attention(wide, wide, wide, precision="int8")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter's")
@pytest.mark.parametrize("name", ["small", "fp16", "padded", "packed"])
@pytest.mark.parametrize("score", [(), (tw.SoftCap(20.0),)], ids=["plain", "softcap"])
def test_the_portable_kernel_multiplies_the_codes(name, score):
    pytest.importorskip("triton")
    operands, options = case(name)
    given = {"precision": "int8", "score": score, "return_lse": True, **options}
    for found, cpu in zip(
        tw.attention(*operands, backend="triton", **given), tw.attention(*operands, **given), strict=True
    ):
        torch.testing.assert_close(found, cpu, rtol=2e-2, atol=2e-3)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter's")
@BOTH
def test_the_kernels_take_what_is_given(precision):
    quantized = pytest.importorskip("tilewise.host.quantize").quantized
    (q, k, v), options = case("padded")
    given = tw.EightBits.of(precision, q, k)
    p, x = call(q, k, v, given, **options)
    for field, a, b in zip(quantize.Codes._fields, quantize.quantize(p, x), quantized(p, x, {}), strict=True):
        if a is not None and field != "q_shift":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field
