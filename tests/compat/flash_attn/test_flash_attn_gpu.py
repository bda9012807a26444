"""The functions below flash_attn's public ones: their signatures, and that they give what autograd gives."""

import inspect

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat.flash_attn import flash_attn_func, flash_attn_gpu, flash_attn_varlen_func
from tilewise.compat.flash_attn import flash_attn_interface as interface

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, H_K, D = 4, 2, 12
WINDOW = "window_size_left window_size_right softcap"
GIVEN = "dout q k v out softmax_lse dq dk dv"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "_flash_attn_forward": f"q k v dropout_p softmax_scale causal {WINDOW} alibi_slopes return_softmax",
    "_flash_attn_varlen_forward": f"q k v {LENGTHS} dropout_p softmax_scale causal {WINDOW} alibi_slopes "
    "return_softmax block_table leftpad_k seqused_k zero_tensors",
    "_flash_attn_backward": f"{GIVEN} dropout_p softmax_scale causal {WINDOW} alibi_slopes deterministic rng_state",
    "_flash_attn_varlen_backward": f"{GIVEN} {LENGTHS} dropout_p softmax_scale causal {WINDOW} alibi_slopes "
    "deterministic rng_state zero_tensors",
}


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    function = getattr(interface, name)
    assert list(inspect.signature(function).parameters) == SIGNATURES[name].split()
    assert getattr(interface, name.replace("_flash", "_wrapped_flash", 1)) is function


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
CASES = {
    "plain": (0.0, None, False, -1, -1, 0.0, None),
    "causal, softcap": (0.0, 0.3, True, -1, -1, 2.0, None),
    "window, alibi": (0.0, 0.3, False, 3, 1, 0.0, SLOPES),
    "dropout": (0.3, 0.3, True, -1, -1, 0.0, None),
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_autograds(case, packed):
    p, scale, causal, left, right, softcap, slopes = CASES[case]
    lead, keys = ((14,), (22,)) if packed else ((2, 7), (2, 11))
    q, k, v = random(*lead, H, D, grad=True), random(*keys, H_K, D, grad=True), random(*keys, H_K, D, grad=True)
    layout = (starts(7, 7), starts(11, 11), 7, 11) if packed else ()
    public = flash_attn_varlen_func if packed else flash_attn_func
    torch.manual_seed(1)
    out, lse, S_dmask = public(q, k, v, *layout, p, scale, causal, (left, right), softcap, slopes, True, True)
    do = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), do)
    torch.manual_seed(1)
    forward = interface._flash_attn_varlen_forward if packed else interface._flash_attn_forward
    got = forward(q, k, v, *layout, p, scale, causal, left, right, softcap, slopes, True)
    for a, b in zip(got, (out, lse, S_dmask), strict=False):
        assert torch.equal(a, b)
        assert not a.requires_grad
    rng_state = got[3]
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    backward = interface._flash_attn_varlen_backward if packed else interface._flash_attn_backward
    written = [torch.full_like(t, torch.nan).detach() for t in (q, k, v)]
    given = do, q, k, v, out, lse, *written, *layout, p, scale, causal, left, right, softcap, slopes, True, rng_state
    softmax_d = backward(*given)
    for a, b in zip(written, expected, strict=True):
        assert_near(a, b)
    assert_near(softmax_d, (do * out).sum(-1).transpose(-1, -2))


def test_the_parts_of_a_ring_add_up():
    q, k, v = random(2, 7, H, D, grad=True), random(2, 12, H_K, D, grad=True), random(2, 12, H_K, D, grad=True)
    out = flash_attn_func(q, k, v)
    do = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), do)
    options = 0.0, D**-0.5, False, -1, -1, 0.0, None
    halves = list(zip(k.detach().chunk(2, 1), v.detach().chunk(2, 1), strict=True))
    parts = [interface._flash_attn_forward(q, *half, *options, False)[:2] for half in halves]
    o, lse = tw.merge(parts)
    assert_near(o, out)
    grads = []
    for half in halves:
        written = [torch.empty_like(t) for t in (q, *half)]
        interface._flash_attn_backward(do, q, *half, o, lse, *written, *options, False)
        grads.append(written)
    (dq0, *dkv0), (dq1, *dkv1) = grads
    assert_near(dq0 + dq1, expected[0])
    for a, b, whole in zip(dkv0, dkv1, expected[1:], strict=True):
        assert_near(torch.cat([a, b], 1), whole)


def test_the_extension_makes_what_is_none_and_writes_what_is_not():
    q, k, v = random(1, 5, H, D), random(1, 6, H_K, D), random(1, 6, H_K, D)
    options = 0.0, D**-0.5, True, -1, -1, 0.0
    place = torch.empty_like(q)
    out, lse, S_dmask, rng_state = flash_attn_gpu.fwd(q, k, v, place, None, *options, False, None)
    assert out is place
    assert S_dmask.shape == (0,)
    dq = torch.empty_like(q)
    got = flash_attn_gpu.bwd(q, q, k, v, out, lse, dq, None, None, None, *options, False, None, rng_state)
    assert got[0] is dq
    assert [t.shape for t in got] == [q.shape, k.shape, v.shape, lse.shape]
    cu = starts(5), starts(6)
    packed = [t[0] for t in (q, k, v)]
    rest = False, *options[2:], False
    rows = flash_attn_gpu.varlen_fwd(*packed, None, *cu, None, None, None, None, 5, 6, *options[:2], *rest, None)
    assert torch.equal(rows[0], out[0])
    grads = flash_attn_gpu.varlen_bwd(
        packed[0], *packed, rows[0], rows[1], None, None, None, *cu, None, 5, 6, *options[:2], *rest, None, rng_state
    )
    for a, b in zip(grads, got, strict=True):
        assert_near(a, b[0])


def test_what_is_refused_says_why():
    q = random(5, H, D)
    with pytest.raises(ValueError, match="rng_state must be what the forward returned"):
        flash_attn_gpu.bwd(*[q[None]] * 5, q[None, ..., 0], *[None] * 4, 0.5, None, True, -1, -1, 0.0, False)
