"""q, k and v that are e4m3 already: exact products in bf16, or e4m3 products, and no gradients."""

import os

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.call.check import check_arguments, describe
from tilewise.quantize import codes as quantize
from tilewise.quantize import dequantize

bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
BACKENDS = [None, *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
CU_Q, CU_K = torch.tensor([[0, 30, 30, 130], [0, 140, 150, 300]], dtype=torch.int32)


def drawn(*shapes, scales, seed=0):
    """Tensors in e4m3 with scales."""
    g = torch.Generator().manual_seed(seed)
    return [
        tw.Quantized(torch.randn(*shape, generator=g).to(e4m3), torch.rand(scales, generator=g) + 0.5)
        for shape in shapes
    ]


def whole(t, B, heads, H_k):
    """What a Quantized of a padded batch stands for, in fp64."""
    each = t.scale.expand(B, H_k).repeat_interleave(heads // H_k, 1)
    return t.x.double() * each[:, None, :, None].double()


def error(found, true):
    return ((found.double() - true).square().mean() / true.square().mean()).sqrt().item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", [None, "int8", "fp8"])
def test_rows_without_any_sequence_are_zeros(precision, backend):
    quantized = drawn((7, 4, 16), (9, 2, 16), (9, 2, 16), scales=())
    cu = torch.zeros(1, dtype=torch.int32)
    given = {"layout": tw.Varlen(cu, cu), "precision": precision, "backend": backend}
    plain = [t.x.to(bf16).requires_grad_() for t in quantized]
    for x in ([plain] if precision else []) + ([quantized] if precision != "int8" else []):
        o, lse = tw.attention(*x, return_lse=True, **given)
        assert (o == 0.0).all()
        assert (lse == -torch.inf).all()
    if precision:
        o, lse = tw.attention(*plain, return_lse=True, **given)
        assert all((g == 0.0).all() for g in torch.autograd.grad((o, lse), plain, (o, torch.zeros_like(lse))))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scales", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize(("precision", "most"), [(None, 5e-3), ("fp8", 3e-2)])
def test_a_batch_is_what_it_stands_for(backend, scales, precision, most):
    q, k, v = drawn((2, 70, 4, 64), (2, 150, 2, 64), (2, 150, 2, 48), scales=scales)
    options = {"mask": tw.Causal(), "score": tw.SoftCap(20.0)}
    o, lse = tw.attention(q, k, v, precision=precision, backend=backend, return_lse=True, **options)
    operands = whole(q, 2, 4, 2), whole(k, 2, 2, 2), whole(v, 2, 2, 2)
    true, true_lse = reference.attention(*operands, mask=options["mask"], score=(options["score"],))
    assert o.dtype == bf16
    assert error(o, true) <= most
    torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("precision", "most"), [(None, 5e-3), ("fp8", 3e-2)])
def test_packed_sequences_have_scales_of_their_own(backend, precision, most):
    q, k, v = drawn((140, 4, 64), (310, 2, 64), (310, 2, 64), scales=(3, 2))
    k.x[300:], v.x[300:] = torch.nan, torch.nan  # rows of no sequence
    sink = torch.linspace(-1, 1, 4)
    o = tw.attention(q, k, v, precision=precision, backend=backend, layout=tw.Varlen(CU_Q, CU_K), sink=sink)
    for b in (0, 2):
        rows, keys = slice(*CU_Q[b : b + 2].tolist()), slice(*CU_K[b : b + 2].tolist())
        one = [
            tw.Quantized(t.x[None, part], t.scale[b : b + 1])
            for t, part in zip((q, k, v), (rows, keys, keys), strict=True)
        ]
        true = reference.attention(*(whole(t, 1, h, 2) for t, h in zip(one, (4, 2, 2), strict=True)), sink=sink)[0]
        assert error(o[rows], true[0]) <= most
    assert not o[130:].any()


def test_nothing_is_rounded_but_p():
    """With one key a row, P is 1, and o is v times its scale."""
    q, k, v = drawn((1, 5, 2, 32), (1, 1, 2, 32), (1, 1, 2, 32), scales=(2,))
    o = tw.attention(q, k, v, precision="fp8")
    assert torch.equal(o, whole(v, 1, 2, 2).to(bf16).expand(1, 5, 2, 32))


def test_codes_are_the_tensors_themselves():
    q, k, v = drawn((140, 4, 64), (310, 2, 64), (310, 2, 40), scales=(3, 2))
    x, recipe, longest = check_arguments(
        q, k, v, tw.Full(), (), None, None, 0.0, tw.Varlen(CU_Q, CU_K), "fp8", False, None
    )  # fmt: skip
    p = describe(x, recipe, longest)
    seen = dequantize.multiplied(p, x, quantize.quantize(p, x))
    of_rows = torch.searchsorted(CU_Q, torch.arange(130), right=True) - 1
    scale = q.scale.repeat_interleave(2, 1)[of_rows][..., None]
    assert torch.equal(seen.q[:130], q.x[:130].float() * scale)
    of_rows = torch.searchsorted(CU_K, torch.arange(300), right=True) - 1
    assert torch.equal(seen.v[:300], v.x[:300].float() * v.scale[of_rows][..., None])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter's")
@pytest.mark.parametrize("packed", [False, True])
def test_a_kernel_copies_the_same_bytes(packed):
    quantized = pytest.importorskip("tilewise.quantize.launch").codes_of
    first = () if packed else (2,)
    q, k, v = drawn((*first, 140, 4, 64), (*first, 310, 2, 64), (*first, 310, 2, 40), scales=(3 if packed else 2, 2))
    layout = tw.Varlen(CU_Q, CU_K) if packed else None
    x, recipe, longest = check_arguments(q, k, v, tw.Full(), (), None, None, 0.0, layout, "fp8", False, None)
    p = describe(x, recipe, longest)
    want, got = quantize.quantize(p, x), quantized(p, x, {})
    if packed:  # other blocks than those of sequences are not written
        seen = zip(
            dequantize.multiplied(p, x, want)[:3], dequantize.multiplied(p, x, got)[:3], (130, 300, 300), strict=True
        )
        assert all(torch.equal(a[:rows], b[:rows]) for a, b, rows in seen)
    else:
        for field, a, b in zip(quantize.Codes._fields, want, got, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


def test_vmap_and_compile_see_the_same_call():
    q, k, v = drawn((3, 2, 20, 2, 32), (3, 2, 30, 2, 32), (3, 2, 30, 2, 32), scales=(2,))
    each = torch.stack(
        [tw.attention(*(tw.Quantized(t.x[n], t.scale) for t in (q, k, v)), precision="fp8") for n in range(3)]
    )

    def call(q_x, k_x, v_x):
        parts = zip((q_x, k_x, v_x), (q, k, v), strict=True)
        return tw.attention(*(tw.Quantized(x, t.scale) for x, t in parts), precision="fp8")

    assert torch.equal(torch.vmap(call)(q.x, k.x, v.x), each)
    traced = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(traced(q.x[0], k.x[0], v.x[0]), each[0])


def test_explain_states_the_pass():
    q, k, v = drawn((1, 64, 2, 64), (1, 4096, 2, 64), (1, 4096, 2, 64), scales=())
    told = tw.explain(q, k, v, device="sm_90")
    assert told.backend == "hopper"
    assert f"q, k and v are converted to bf16 first, {2 * (64 + 2 * 4096) * 128} bytes" in told.tiles
    told = tw.explain(q, k, v, device="sm_90", precision="fp8")
    assert told.backend == "hopper"
    assert "approximate: e4m3 Q K^T, e4m3 P V" in told.tiles
    assert "multiplies no e4m3" in tw.explain(q, k, v, device="sm_80", precision="fp8").refusals["triton"][0]


def test_what_is_refused_says_why():
    q, k, v = drawn((1, 8, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16), scales=())
    plain = torch.randn(1, 9, 2, 16)
    with pytest.raises(TypeError, match="v must be a Quantized where q is, got Tensor"):
        tw.attention(q, k, plain)
    with pytest.raises(ValueError, match="layout must be None or a Varlen where q is a Quantized"):
        tw.attention(q, k, v, layout=tw.Cached(torch.tensor([9])))
    with pytest.raises(ValueError, match="precision must be None or fp8 where q is a Quantized, got 'int8'"):
        tw.attention(q, k, v, precision="int8")
    with pytest.raises(ValueError, match=r"k's scale must have shape \(\), \(2,\) or \(1, 2\), one number"):
        tw.attention(q, tw.Quantized(k.x, torch.ones(3)), v)
    with pytest.raises(ValueError, match=r"q must have shape \(batch, length, heads, head size\), got \(8, 2, 16\)"):
        tw.attention(tw.Quantized(q.x[0], q.scale), k, v)
    with pytest.raises(ValueError, match="v's scale must be finite and > 0"):
        tw.attention(q, k, tw.Quantized(v.x, torch.zeros(())), precision="fp8")
    with pytest.raises(tw.Unsupported, match="for inference, and an operand has requires_grad=True"):
        tw.attention(q, tw.Quantized(k.x, torch.ones((), requires_grad=True)), v)
    sink = torch.zeros(2, requires_grad=True)
    with pytest.raises(tw.Unsupported, match="for inference, and an operand has requires_grad=True"):
        tw.attention(q, k, v, precision="fp8", sink=sink)
    o, lse = tw.attention(q, k, v, return_lse=True)
    with pytest.raises(tw.Unsupported, match="have no backward"):
        tw.attention_backward(o, q, k, v, o, lse)
