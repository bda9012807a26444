"""Masks and scores that are functions, on a GPU: all of tests/program/functions.py against fp64, and ours as functions.

o, lse and all gradients, those of captured tensors that learn, too, are compared with the CPU back end's in fp64.
"""

from functools import cache

import pytest
import torch
from program import functions

import tilewise as tw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
DEVICE = "cuda"
bf16, fp32 = torch.bfloat16, torch.float32
KINDS = {
    "hopper bf16": ("hopper", bf16), "hopper fp32": ("hopper", fp32),
    "triton bf16": ("triton", bf16), "triton fp32": ("triton", fp32),
}  # fmt: skip
OFF = {bf16: 2e-2, fp32: 2e-5}
"""Of a tensor's largest entry, and of one where all are small: what sums over much cancels."""
H = functions.H
TINY = (functions.M, functions.N, 64, 1)
"""M, N, D, H_k."""
LARGE = {"D64": (300, 437, 64, 1), "D128": (333, 500, 128, 3), "square": (481, 481, 128, 1)}
"""Several tiles, and lengths that no tile divides."""
AMONG_MANY = (
    "alibi", "alibi_learned", "softcap", "relative", "t5", "graphormer_edges", "one_bias_twice", "temperature",
    "forgetting", "gated", "causal_as_score", "two_tables", "causal", "window", "window_per_head", "prefix_lm",
    "document", "document_causal", "dilated", "natten", "block_diffusion", "sinks_and_window", "longformer", "padding",
    "token_tree", "stripes", "sloped", "not_near",
)  # fmt: skip
"""Functions whose tables are of these lengths, too."""


def draw(M, N, D, H_k, packed, dtype):
    """q, k, v and do of two sequences; packed, the second is whole, and the first ends early."""
    made = torch.Generator().manual_seed(1)
    rows, keys = ((M // 2 + M,), (N // 2 + N,)) if packed else ((2, M), (2, N))
    shapes = (*rows, H, D), (*keys, H_k, D), (*keys, H_k, D), (*rows, H, D)
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def layout(M, N, packed, device):
    """The layout of these."""
    if not packed:
        return None
    cu = [torch.tensor([0, n // 2, n // 2 + n], dtype=torch.int32, device=device) for n in (M, N)]
    return tw.Varlen(*cu, M, N)


def moved(t, device):
    """A tensor on a device, with its strides."""
    flat = t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return flat.to(device).as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_(t.requires_grad)


def results(operands, learned, **given):
    """o, lse, and the gradients of q, k, v and of what learns."""
    *x, do = operands
    leaves = [*(t.requires_grad_() for t in x), *learned]
    o, lse = tw.attention(*x, return_lse=True, **given)
    return o, lse, *torch.autograd.grad((o, lse), leaves, (do, lse.isfinite().to(lse.dtype)))


@cache
def example(name, M, N):
    """A function among tensors for M rows and N keys."""
    assert (functions.M, functions.N) == (M, N)
    return functions.examples()[name]


@cache
def truth(name, M, N, D, H_k, packed, dtype, computed=torch.float64):
    """The same call on the CPU in fp64, or in fp32."""
    wide = example(name, M, N).to(computed)
    made = (tw.Mask if wide.what == "mask" else tw.Score).of(wide.fn, *wide.tensors)
    operands = [t.to(computed) for t in draw(M, N, D, H_k, packed, dtype)]
    learned = [t for t in wide.tensors if t.requires_grad]
    return results(operands, learned, **{wide.what: made}, layout=layout(M, N, packed, "cpu"), backend="cpu")


def compare(name, kind, M, N, D, H_k, packed):
    backend, dtype = KINDS[kind]
    given = example(name, M, N)
    tensors = [moved(t, DEVICE) for t in given.tensors]
    made = (tw.Mask if given.what == "mask" else tw.Score).of(given.fn, *tensors)
    operands = [t.to(DEVICE) for t in draw(M, N, D, H_k, packed, dtype)]
    options = {given.what: made, "layout": layout(M, N, packed, DEVICE), "backend": backend}
    skip_refused(operands[:3], options)
    learned = [t for t in tensors if t.requires_grad]
    found = results(operands, learned, **options)
    true = truth(name, M, N, D, H_k, packed, dtype)
    names = ["o", "lse", "dq", "dk", "dv", *[f"gradient {n} of a captured tensor" for n in range(len(learned))]]
    for what, t, want in zip(names, found, true, strict=True):
        rounded, finite = OFF[dtype] + torch.finfo(t.dtype).eps, want.isfinite()
        got = t.detach().double().cpu()
        assert torch.equal(got[~finite], want[~finite]), f"{what} where it is not finite"
        if finite.any():
            error, largest = (got - want)[finite].abs().max(), want[finite].abs().max()
            if error > (allowed := rounded * (largest + 1)) and dtype == fp32:  # large logits lose digits everywhere
                on_cpu = truth(name, M, N, D, H_k, packed, dtype, fp32)[names.index(what)]
                allowed = 4.0 * (on_cpu.double() - want)[finite].abs().max()
            assert error <= allowed, f"{what} is off by {error:.2g}, its largest is {largest:.2g}"


def skip_refused(operands, options):
    """Skip what kernels refuse for a known reason; any other is a failure."""
    backend, fp32_scores = options["backend"], options.get("score") and operands[0].dtype == fp32
    if backend == "hopper" and DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need sm_90")
    if reasons := tw.explain(*operands, **options).refusals[backend]:
        packed = "it leaves packed sequences with a bias to the portable kernels" in reasons
        known = backend == "hopper" and (fp32_scores or packed)
        assert known, reasons
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", functions.examples())
def test_every_function(name, packed, kind):
    compare(name, kind, *TINY, packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("name", AMONG_MANY)
def test_among_many_tiles(name, size, kind, monkeypatch):
    M, N, *_ = LARGE[size]
    for of, number in (("M", M), ("N", N), ("SIDE", 20)):
        monkeypatch.setattr(functions, of, number)
    compare(name, kind, *LARGE[size], packed=size == "square")


LENGTHS, SLOPES = torch.tensor([170, 401], dtype=torch.int32), torch.tensor([0.5, 0.25, 0.0625])
MASKS = {
    "Causal": (tw.Causal, lambda b, h, i, j: j <= i, ()),
    "Window": (lambda: tw.Window(150, 20), lambda b, h, i, j: (i - 150 <= j) & (j <= i + 20), ()),
    "Prefix": (tw.Prefix, lambda b, h, i, j, lengths: (j < lengths[b]) | (j <= i), (LENGTHS,)),
    "Padding": (tw.Padding, lambda b, h, i, j, lengths: j < lengths[b], (LENGTHS,)),
}
SCORES = {
    "SoftCap": (lambda: tw.SoftCap(3.0), lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0), ()),
    "Alibi": (tw.Alibi, lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j).abs(), (SLOPES,)),
}


def both(what, own, fn, tensors, kind, D):
    """The results of ours and of the function, in a fixed order of sums, as Hopper adds dQ up in any."""
    backend, dtype = KINDS[kind]
    tensors = [t.to(DEVICE) for t in tensors]
    of = (tw.Mask if what == "mask" else tw.Score).of
    for made in (own(*tensors), of(fn, *tensors, align="last")):
        operands = [t.to(DEVICE) for t in draw(300, 437, D, 1, False, dtype)]
        options = {what: made, "backend": backend, "deterministic": True}
        skip_refused(operands[:3], options)
        yield results(operands, [], **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_our_masks_as_functions_give_the_same_bits(name, D, kind):
    for of, want, got in zip(("o", "lse", "dq", "dk", "dv"), *both("mask", *MASKS[name], kind, D), strict=True):
        assert torch.equal(got, want), f"{of} differs by {(got.double() - want.double()).abs().max():.2g}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", SCORES)
def test_our_scores_as_functions_are_as_accurate(name, D, kind):
    """Not the same bits: a function multiplies by scale / cap, and may be of any size, so its softmax is kept safe."""
    own, fn, tensors = SCORES[name]
    wide = [t.double() for t in draw(300, 437, D, 1, False, KINDS[kind][1])]
    true = results(wide, [], score=own(*[t.double() for t in tensors]), backend="cpu")
    for of, want, *found in zip(
        ("o", "lse", "dq", "dk", "dv"), true, *both("score", own, fn, tensors, kind, D), strict=True
    ):
        ours, error = [float((t.double().cpu() - want).detach().abs().max()) for t in found]
        allowed = 2.0 * ours + 2.0 * torch.finfo(found[0].dtype).eps * float(want.detach().abs().max())
        assert error <= allowed, f"{of} is off by {error:.2g}, ours by {ours:.2g}"
