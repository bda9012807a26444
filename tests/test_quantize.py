"""8-bit products: codes bit by bit in both forms, errors, what is saved, gradients, rotary, and what is not finite."""

import os

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.call.check import check_arguments, describe
from tilewise.quantize import codes as quantize

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


def angles(R, rows=320, dtype=torch.float32):
    """cos and sin of some angles; cos is a view."""
    drawn = torch.randn(rows, R // 2, generator=torch.Generator().manual_seed(R))
    return torch.cat([drawn.cos(), drawn], 1).to(dtype)[:, : R // 2], drawn.sin().to(dtype)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("name", "R"), [("small", 16), ("fp16", 38), ("padded", 64), ("not finite", 64), ("packed", 20)]
)
@pytest.mark.parametrize("pairs", [None, "halves", "neighbours"])
@BOTH
def test_kernels_compute_the_codes_of_plain_torch_bit_by_bit(name, R, pairs, precision):
    launches = pytest.importorskip("tilewise.quantize.launch").quantize_launches
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands, options = case(name)
    options = {key: value.to(device) for key, value in options.items()}
    if pairs:
        cos, sin = angles(R)
        precision = tw.EightBits(precision, cos=cos, sin=sin, interleaved=pairs == "neighbours").to(device)
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
    # a longer product may be summed in another order; with scales of 1e4 all codes would be 0
    torch.testing.assert_close(o, tw.attention(q, k, v, precision=precision), rtol=2**-7, atol=2**-10)


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
    assert "approximate: int8 Q K^T, e4m3 P V; with 100 keys not faster than 16 bits in every measurement" in told.tiles
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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("name", "R"), [("small", 16), ("small", 10), ("fp16", 40), ("padded", 64), ("not finite", 22), ("packed", 64)]
)
@BOTH
def test_rotary_in_the_pre_pass_is_rotary_before_the_call(name, R, interleaved, precision):
    operands, options = case(name)
    tables = angles(R, dtype=bf16 if R == 40 else torch.float32)
    ends = options["layout"].tensors if name == "packed" else (None, None)
    options["return_lse"] = True
    do = torch.randn(*operands[0].shape[:-1], operands[2].shape[-1], generator=torch.Generator().manual_seed(2))

    def rotated(t, cu):
        """With packed sequences, those rows that belong to one."""
        if cu is None:
            return tw.rotary(t, *tables, interleaved=interleaved)
        return torch.cat([tw.rotary(t[: cu[-1]], *tables, interleaved=interleaved, cu_seqlens=cu), t[cu[-1] :]])

    def results(fused):
        leaves = [t.detach().requires_grad_() for t in operands]
        if fused:
            given = tw.EightBits(precision, cos=tables[0], sin=tables[1], interleaved=interleaved)
            o, lse = tw.attention(*leaves, precision=given, **options)
        else:
            q, k = (rotated(t, cu) for t, cu in zip(leaves[:2], ends, strict=True))
            o, lse = tw.attention(q, k, leaves[2], precision=precision, **options)
        dlse = torch.where(lse.isfinite(), 0.1, 0.0)
        return o, lse, *torch.autograd.grad((o, lse), leaves, (do.to(o.dtype), dlse))

    for found, want in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@BOTH
def test_rotary_goes_with_given_statistics_and_other_callers(precision):
    """mean and balance; one tensor for q, k and v; attention_backward; vmap; an operator under torch.compile."""
    g = torch.Generator().manual_seed(11)
    qkv = torch.randn(2, 2, 40, 3, 2, 32, generator=g).to(bf16)
    q, k, v = qkv[0].unbind(-3)
    cos, sin = angles(20)
    rotated = tw.rotary_qk(q, k, cos, sin)
    of_layer = tw.EightBits.of(precision, *rotated)
    own = tw.EightBits(precision, of_layer.mean, of_layer.balance, cos, sin).to("cpu")
    assert torch.equal(tw.attention(q, k, v, precision=own), tw.attention(*rotated, v, precision=of_layer))

    given = tw.EightBits(precision, cos=cos, sin=sin)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = tw.attention(*leaves, precision=given, return_lse=True)
    do = torch.randn(o.shape, generator=g).to(bf16)
    grads = torch.autograd.grad(o, leaves, do)
    found = tw.attention_backward(do, q, k, v, o.detach(), lse.detach(), precision=given)
    whole = qkv[0].detach().requires_grad_()
    packed = tw.attention_qkvpacked(whole, precision=given)
    (of_whole,) = torch.autograd.grad(packed, whole, do)
    run = torch.compile(
        lambda *x: tw.attention(*x, precision=tw.EightBits(precision, cos=cos, sin=sin)), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    compiled = run(*leaves)
    of_compiled = torch.autograd.grad(compiled, leaves, do)
    for again in (packed, compiled):
        assert torch.equal(o, again)
    for a, *others in zip(grads, found, of_whole.unbind(-3), of_compiled, strict=True):
        for b in others:
            assert torch.equal(a, b)

    def f(qkv, cos, sin):
        return tw.attention(*qkv.unbind(-3), precision=tw.EightBits(precision, cos=cos, sin=sin))

    each = torch.stack([f(one, cos, sin) for one in qkv])
    assert torch.equal(torch.vmap(f, (0, None, None))(qkv, cos, sin), each)
    each = torch.stack([f(qkv[0], cos, sin), f(qkv[0], sin, cos)])
    both = torch.stack([cos, sin]), torch.stack([sin, cos])
    assert torch.equal(torch.vmap(f, (None, 0, 0))(qkv[0], *both), each)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter's")
def test_the_portable_kernel_multiplies_codes_of_rotated_rows():
    pytest.importorskip("triton")
    (q, k, v), _ = case("small")
    tables = angles(10)
    before = tw.rotary(q, *tables), tw.rotary(k, *tables)
    fused = tw.attention(q, k, v, precision=tw.EightBits("int8", None, None, *tables), backend="triton")
    assert torch.equal(fused, tw.attention(*before, v, precision="int8", backend="triton"))


def test_rotarys_tables_are_checked():
    q = torch.randn(1, 8, 2, 64, dtype=bf16)
    cos, sin = angles(64, 8)

    def attend(cos, sin, **options):
        return tw.attention(q, q, q, precision=tw.EightBits("fp8", cos=cos, sin=sin), **options)

    with pytest.raises(ValueError, match="EightBits: cos must be given with sin, got one alone"):
        tw.EightBits("fp8", cos=cos)
    with pytest.raises(ValueError, match="EightBits: mean must be given with balance"):
        tw.EightBits("fp8", torch.zeros(2, 64))
    with pytest.raises(TypeError, match="cos must be of type float16"):
        attend(cos.int(), sin)
    with pytest.raises(ValueError, match=r"one shape \(positions, R / 2\), got sin \(8, 10\)"):
        attend(cos, sin[:, :10])
    with pytest.raises(ValueError, match="between 1 and D / 2 = 32 columns, got 33"):
        attend(*angles(66, 8))
    with pytest.raises(ValueError, match="a row for every position up to 7, got 7 rows"):
        attend(cos[:7], sin[:7])
    with pytest.raises(ValueError, match="cos must have no gradient"):
        attend(cos.clone().requires_grad_(), sin)
    with pytest.raises(ValueError, match="origin must have row=0 and column=0 where EightBits has cos and sin, got 64"):
        attend(cos, sin, origin=tw.Origin(64, 0))
    ends = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="a row for every position up to 7, got 5 rows"):
        tw.attention(q[0], q[0], q[0], layout=tw.Varlen(ends, ends),
                     precision=tw.EightBits("int8", cos=cos[:5], sin=sin[:5]))  # fmt: skip


def test_explain_says_where_rotary_is_done():
    q = torch.randn(1, 100, 1, 64, dtype=bf16)
    given = tw.EightBits("fp8", None, None, *angles(64))
    assert "; the pass that writes codes applies rotary to q and k; " in tw.explain(q, q, q, precision=given).tiles
    on_hopper = tw.explain(q, q, q, precision=given, device="sm_90", backend="hopper").tiles
    assert "applies rotary to q and k; " in on_hopper


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


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize(("B", "M", "N"), [(0, 16, 16), (2, 0, 16), (2, 16, 0)])
@BOTH
def test_nothing_has_results_of_its_shape(precision, B, M, N, backend):
    if backend and (os.environ.get("TRITON_INTERPRET") != "1" or not pytest.importorskip("triton")):
        pytest.skip("runs in Triton's interpreter")
    q, k = torch.randn(B, M, 4, 8).to(fp16), torch.randn(B, N, 2, 8).to(fp16)
    learned = [t.requires_grad_() for t in (q, k, k.clone())]
    o, lse = tw.attention(*learned, precision=precision, return_lse=True, backend=backend)
    assert (o.shape, lse.shape) == (q.shape, (B, 4, M))
    assert not o.any()
    assert lse.isneginf().all()
    for t, grad in zip(learned, torch.autograd.grad(o.sum(), learned), strict=True):
        assert grad.shape == t.shape
        assert not grad.any()
    eight = [tw.Quantized(t.detach().to(torch.float8_e4m3fn), torch.ones(2)) for t in learned]
    assert tw.attention(*eight, precision="fp8", backend=backend).shape == q.shape


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter's")
@BOTH
def test_the_kernels_take_what_is_given(precision):
    quantized = pytest.importorskip("tilewise.quantize.launch").codes_of
    (q, k, v), options = case("padded")
    given = tw.EightBits.of(precision, q, k)
    p, x = call(q, k, v, given, **options)
    for field, a, b in zip(quantize.Codes._fields, quantize.quantize(p, x), quantized(p, x, {}), strict=True):
        if a is not None and field != "q_shift":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field
