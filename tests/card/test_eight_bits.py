"""8-bit products on a GPU: codes as plain torch's, results as the CPU's, gradients, rotary, and a CUDA graph."""

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.call.check import check_arguments, describe
from tilewise.quantize import codes as quantize
from tilewise.quantize import dequantize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
bf16 = torch.bfloat16


def drawn(M, N, H, H_k, D, seed=0):
    """Operands with means in K and V, on the CPU."""
    g = torch.Generator().manual_seed(seed)

    def draw(n, h):
        return torch.randn(2, n, h, D, generator=g) + torch.randn(D, generator=g)

    return draw(M, H).to(bf16), draw(N, H_k).to(bf16), draw(N, H_k).to(bf16)


def refused(q, k, v, precision, **options):
    """Skip where no kernel on this GPU takes a call."""
    if tw.explain(q, k, v, precision=precision, **options).backend is None:
        pytest.skip(f"no kernel for {precision} here")


def with_rotary(precision, R, pairs, dtype=torch.float32):
    """A precision with tables for 700 positions, on the GPU."""
    angles = torch.randn(700, R // 2, generator=torch.Generator().manual_seed(R)).to("cuda", dtype)
    return tw.EightBits(precision, cos=angles.cos(), sin=angles.sin(), interleaved=pairs == "neighbours")


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("pairs", [None, "halves", "neighbours"])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_codes_are_those_of_plain_torch(precision, pairs, D):
    operands = [t.cuda() for t in drawn(300, 700, 4, 2, D)]
    precision = with_rotary(precision, D, pairs) if pairs else precision
    refused(*operands, precision)
    x, recipe, longest = check_arguments(
        *operands, tw.Full(), (), None, None, 0.0, None, precision, False, None
    )  # fmt: skip
    p = describe(x, recipe, longest)
    want, got = quantize.quantize(p, x), dequantize.codes_of(p, x)
    for field, a, b in zip(quantize.Codes._fields, want, got, strict=True):
        if a is not None and field != "q_shift":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_e4m3_tensors_are_copied_as_they_are(D, packed):
    ends = torch.tensor([[0, 130, 130, 300], [0, 140, 400, 700]], dtype=torch.int32, device="cuda")
    operands = [
        tw.Quantized((t[0] if packed else t).cuda().to(torch.float8_e4m3fn), torch.full((2,), 0.5 + n, device="cuda"))
        for n, t in enumerate(drawn(300, 700, 4, 2, D))
    ]
    layout = tw.Varlen(*ends) if packed else None
    refused(*operands, "fp8", layout=layout)
    x, recipe, longest = check_arguments(
        *operands, tw.Full(), (), None, None, 0.0, layout, "fp8", False, None
    )  # fmt: skip
    p = describe(x, recipe, longest)
    want, got = quantize.quantize(p, x), dequantize.codes_of(p, x)
    for a, b in zip(dequantize.multiplied(p, x, want)[:3], dequantize.multiplied(p, x, got)[:3], strict=True):
        assert torch.equal(a, b)
    if not packed:  # zeros after the last row, too
        for field, a, b in zip(quantize.Codes._fields, want, got, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotary_has_the_bits_of_the_cpu(pairs, dtype):
    """So codes do, too, that are made of turned rows."""
    given = with_rotary("int8", 90, pairs)
    for t in drawn(300, 700, 4, 2, 128)[:2]:
        x, options = t.to(dtype), {"interleaved": given.interleaved}
        found = tw.rotary(x.cuda(), given.cos, given.sin, **options)
        assert torch.equal(found.cpu(), tw.rotary(x, given.cos.cpu(), given.sin.cpu(), **options))


@pytest.mark.parametrize(("D", "R"), [(64, 64), (128, 128), (128, 64), (128, 90), (96, 96), (256, 256)])
@pytest.mark.parametrize(("packed", "pairs"), [(False, "halves"), (True, "neighbours")])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_rotary_in_the_pre_pass_is_rotary_before_the_call(precision, pairs, packed, D, R):
    """o has its bits, as codes do. lse adds q . mean, summed in an order of threads' columns, and gradients read it."""
    given = with_rotary(precision, R, pairs, bf16 if R == 64 else torch.float32)
    operands = [(t[0] if packed else t).cuda() for t in drawn(300, 700, 4, 2, D)]
    ends = torch.tensor([[0, 130, 130, 300], [0, 140, 400, 700]], dtype=torch.int32, device="cuda")
    options = {"deterministic": True, "mask": tw.Causal(), "layout": tw.Varlen(*ends) if packed else None}
    refused(*operands, given, **options)
    do = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(9)).to("cuda", bf16)

    def results(fused):
        q, k, v = leaves = [t.detach().requires_grad_() for t in operands]
        if not fused:
            q, k = (
                tw.rotary(t, given.cos, given.sin, interleaved=given.interleaved, cu_seqlens=cu)
                for t, cu in zip((q, k), ends if packed else (None, None), strict=True)
            )
        o, lse = tw.attention(q, k, v, precision=given if fused else precision, return_lse=True, **options)
        return o, lse, *torch.autograd.grad(o, leaves, do)

    (o, lse, *grads), (o_before, lse_before, *before) = results(True), results(False)
    assert torch.equal(o, o_before)
    torch.testing.assert_close(lse, lse_before, rtol=1e-6, atol=1e-6)
    for found, want in zip(grads, before, strict=True):
        assert (found - want).float().norm() <= 1e-3 * want.float().norm()


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal(), tw.Window(100, 0)], ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_errors_are_those_of_the_cpu(backend, precision, mask, D):
    """The rule of approximations: 1.1 times the CPU's error, and two units in the last place of the largest entry."""
    q, k, v = drawn(300, 700, 4, 2, D)
    refused(q.cuda(), k.cuda(), v.cuda(), precision, mask=mask, backend=backend)
    do = torch.randn(2, 300, 4, D, generator=torch.Generator().manual_seed(9)).to(bf16)

    def results(device):
        leaves = [t.to(device).detach().requires_grad_() for t in (q, k, v)]
        chosen = backend if device == "cuda" else None
        o, lse = tw.attention(*leaves, mask=mask, precision=precision, return_lse=True, backend=chosen)
        return [t.detach().cpu() for t in (o, lse, *torch.autograd.grad(o, leaves, do.to(device)))]

    wide = [t.double() for t in (q, k, v)]
    true = [*reference.attention(*wide, mask=mask), *reference.gradients(*wide, do.double(), mask=mask)[:3]]
    for name, ours, theirs, t in zip(
        ("o", "lse", "dq", "dk", "dv"), results("cuda"), results("cpu"), true, strict=True
    ):
        units = 2 * torch.finfo(bf16).eps * t.abs().max().item()
        found, allowed = ((x.double() - t).square().mean().sqrt().item() for x in (ours, theirs))
        assert found <= 1.1 * allowed + units, name


@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_square_tile_on_the_diagonal_has_zeros_where_nothing_is_seen(D):
    """With a score, the first warpgroup's P is half a tile of exponentials, and then what is 0 in e4m3."""
    q, k, v = (t.cuda() for t in drawn(512, 512, 4, 4, D))
    options = {"mask": tw.Causal(), "score": tw.SoftCap(30.0)}
    refused(q, k, v, "fp8", **options)
    o, want = (tw.attention(q, k, v, precision=name, **options).float() for name in ("fp8", None))
    by_row = (o - want).norm(dim=-1) / want.norm(dim=-1)
    assert by_row.max() < 0.15  # with a register unset: up to 3, or NaN


def variants():
    """Options of calls with 300 queries and 700 keys, 4 and 2 heads."""
    g = torch.Generator().manual_seed(4)
    ends = torch.tensor([[0, 130, 130, 300], [0, 140, 400, 700]], dtype=torch.int32)
    no_keys = torch.tensor([[0, 130, 200, 300], [0, 300, 300, 700]], dtype=torch.int32)
    return {
        "softcap": {"score": tw.SoftCap(20.0)},
        "bias": {"score": tw.Bias(torch.randn(4, 300, 700, generator=g))},
        "large bias": {"score": tw.Bias(torch.full((300, 700), -1e9))},
        "sink": {"sink": torch.randn(4, generator=g)},
        "dropout": {"dropout": 0.2, "seed": 7},
        "padding": {"mask": tw.Padding(torch.tensor([0, 500]))},
        "window": {"mask": tw.Window(90, 30)},
        "packed": {"layout": tw.Varlen(*ends)},
        "packed, a sequence without keys": {"layout": tw.Varlen(*no_keys), "mask": tw.Causal()},
    }


def moved(options, device):
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in options.items()}


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", variants())
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_every_variant_errs_as_on_the_cpu(precision, name, D):
    """Against the same call in 16 bits."""
    options = variants()[name]
    if precision == "fp8" and "dropout" in options:
        pytest.skip("refused")
    drawn_q, drawn_k, drawn_v = drawn(300, 700, 4, 2, D)
    operands = [t[0] if "layout" in options else t for t in (drawn_q, drawn_k, drawn_v)]
    refused(
        *(t.cuda() for t in operands), precision, **{k: v for k, v in moved(options, "cuda").items() if k != "seed"}
    )

    def results(device, precision):
        given = moved(options, device)
        found = tw.attention(*(t.to(device) for t in operands), precision=precision, return_lse=True, **given)
        return [t.cpu().double() for t in found]

    exact, ours, theirs = results("cuda", None), results("cuda", precision), results("cpu", precision)
    for what, t, a, b in zip(("o", "lse"), exact, ours, theirs, strict=True):
        assert torch.equal(a.isneginf(), t.isneginf()), what
        seen = t.isfinite()
        assert a[seen].isfinite().all(), what
        found, allowed = ((x - t)[seen].square().mean().sqrt().item() for x in (a, b))
        units = 2 * torch.finfo(bf16).eps * t[seen].abs().max().item()
        assert found <= 1.1 * allowed + units, what


@pytest.mark.parametrize("mask", [tw.Full(), tw.Window(100, 50)], ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_zeros_and_what_is_not_finite(precision, mask):
    q, k, v = (t.cuda() for t in drawn(300, 700, 4, 2, 128))
    refused(q, k, v, precision, mask=mask)
    q[0, 5:9], k[:, 128:256] = 0.0, 0.0
    assert tw.attention(q, k, v, precision=precision, mask=mask).isfinite().all()
    q[0, 20, 1, 3], k[1, 400, 0, 0] = torch.nan, torch.inf
    o = tw.attention(q, k, v, precision=precision, mask=mask).cpu()
    cpu = tw.attention(q.cpu(), k.cpu(), v.cpu(), precision=precision, mask=mask)
    assert torch.equal(o.isnan(), cpu.isnan())


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(bf16, "int8"), (bf16, "fp8"), (bf16, None), (torch.float32, None)], ids=str
)
def test_long_rows_keep_the_length_of_o(dtype, precision, D):
    """With a mean in V, sums that stayed in the tensor core would shrink O by 8.7 %."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, D, generator=g) for n in (64, 1 << 17, 1 << 17))
    q, k, v = (t.to(dtype).cuda() for t in (q, k, v + torch.randn(D, generator=g)))
    refused(q, k, v, precision)
    rows, keys, values = (t[0, :, 0].double() for t in (q, k, v))
    true = torch.softmax(rows @ keys.mT * D**-0.5, -1) @ values
    o = tw.attention(q, k, v, precision=precision)[0, :, 0].double()
    assert ((o * true).sum() / true.square().sum()).item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("D", [128, 256])
def test_tiles_of_v_may_differ_a_million_times(D, mask):
    """Each has its own scale, and O is rescaled from one to the next."""
    q, k, v = drawn(700, 4000, 4, 2, D)
    powers = torch.randint(-4, 3, (32,), generator=torch.Generator().manual_seed(3))
    v = (v.float() * 10.0 ** powers.repeat_interleave(128)[:4000, None, None]).to(bf16)
    on_card = [t.cuda() for t in (q, k, v)]
    refused(*on_card, "fp8", mask=mask)
    true = reference.attention(*[t.double() for t in (q, k, v)], mask=mask)[0]
    ours, theirs = (
        tw.attention(*on_card, mask=mask, precision="fp8").cpu(),
        tw.attention(q, k, v, mask=mask, precision="fp8"),
    )
    found, allowed = (((x.double() - true).norm(dim=-1) / true.norm(dim=-1)) for x in (ours, theirs))
    assert found.square().mean().sqrt() <= 1.1 * allowed.square().mean().sqrt()
    assert found.max() <= 1.5 * allowed.max()


@pytest.mark.parametrize("pairs", [None, "halves"])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_graph_replays_with_other_numbers(precision, pairs):
    precision = with_rotary(precision, 128, pairs) if pairs else precision
    q, k, v = (t.cuda() for t in drawn(300, 700, 4, 2, 128))
    refused(q, k, v, precision)
    tw.attention(q, k, v, precision=precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tw.attention(q, k, v, precision=precision)
    for t, other in zip((q, k, v), drawn(300, 700, 4, 2, 128, seed=1), strict=True):
        t.copy_(other)
    graph.replay()
    assert torch.equal(o, tw.attention(q, k, v, precision=precision))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("logits", ["drawn", "negative", "negative at first"])
def test_tensors_in_e4m3_err_as_on_the_cpu(logits, packed, D):
    """At head sizes 64 and 128 their row max is one of integers, which is right only if it is not negative."""
    ends = torch.tensor([[0, 130, 130, 300], [0, 140, 400, 700]], dtype=torch.int32)
    scales = torch.rand(3 if packed else 2, 2, generator=torch.Generator().manual_seed(2)) + 0.5
    q, k, v = drawn(300, 700, 4, 2, D)
    if logits != "drawn":  # keys are read from the last
        q, k = -q.abs(), k.abs() if logits == "negative" else torch.cat([k[:, :100], k[:, 100:].abs()], 1)
    operands = [t[0] if packed else t for t in (q, k, v)]
    eight = [tw.Quantized(t.to(torch.float8_e4m3fn), scales) for t in operands]

    def options(device):
        return {"mask": tw.Causal(), "layout": tw.Varlen(*ends.to(device)) if packed else None}

    def results(device, precision):
        given = {"precision": precision, "return_lse": True, **options(device)}
        return [t.cpu().double() for t in tw.attention(*(t.to(device) for t in eight), **given)]

    refused(*(t.to("cuda") for t in eight), "fp8", **options("cuda"))
    exact, theirs = results("cpu", None), results("cpu", "fp8")
    plain, ours = results("cuda", None), results("cuda", "fp8")
    for what, t, a, b, c in zip(("o", "lse"), exact, ours, theirs, plain, strict=True):
        seen, units = t.isfinite(), 2 * torch.finfo(bf16).eps * t[t.isfinite()].abs().max().item()
        assert torch.equal(a.isneginf(), t.isneginf()), what
        found, allowed = ((x - t)[seen].square().mean().sqrt().item() for x in (a, b))
        assert found <= 1.1 * allowed + units, what
        assert (c - t)[seen].abs().max().item() <= units, what


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("key", [0, 3, 11, 130, 699])
def test_a_nan_in_e4m3_reaches_every_row_that_sees_it(key, D):
    """Half of P's bits are computed without exponentials, and would not show it."""
    q, k, v = (t.to(torch.float8_e4m3fn) for t in drawn(300, 700, 4, 2, D))
    k[1, key, 1, 5] = torch.nan
    eight = [tw.Quantized(t.cuda(), torch.ones((), device="cuda")) for t in (q, k, v)]
    refused(*eight, "fp8", mask=tw.Causal())
    o, lse = (t.isnan() for t in tw.attention(*eight, mask=tw.Causal(), precision="fp8", return_lse=True))
    sees = torch.arange(300, device="cuda") + 400 >= key
    assert torch.equal(lse[1, 2:], sees.expand(2, 300))
    assert torch.equal(o[1, :, 2:].all(-1), sees[:, None].expand(300, 2))
    assert lse.sum() == 2 * sees.sum()  # nowhere else
    assert o.sum() == 2 * D * sees.sum()
