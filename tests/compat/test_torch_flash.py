"""tilewise.compat.torch_flash: torch.nn.attention.varlen.varlen_attn on tilewise, sequence by sequence as SDPA."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from tilewise.compat import torch_flash

flash = torch.nn.attention
varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")
if not hasattr(flash, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry of flash attention", allow_module_level=True)

ENDS = [0, 5, 5, 16]
CU = torch.tensor(ENDS, dtype=torch.int32)
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (3, 2)]


@pytest.fixture
def active():
    torch_flash.register(devices=("cpu",))
    flash.activate_flash_attention_impl("tilewise")
    yield
    flash.restore_flash_attention_impl()


def operands():
    return [torch.randn(16, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def seen(length, left, right):
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))


def one_by_one(q, k, v, window):
    """Compute each sequence by SDPA."""
    outs = []
    for start, end in pairwise(ENDS):
        parts = [t[start:end].transpose(0, 1)[None] for t in (q, k, v)]
        mask = seen(end - start, *window)
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def attend(q, k, v, window, **options):
    return varlen.varlen_attn(q, k, v, CU, CU, 11, 11, window_size=window, enable_gqa=True, **options)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences_are_as_one_by_one(active, window, compiled):
    torch._dynamo.reset()
    x = operands()
    expected = one_by_one(*x, window)
    do = torch.randn_like(expected)
    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    with tw.count_calls() as calls:
        found = call(*x, window)
    torch.testing.assert_close(found, expected)
    pairs = zip(torch.autograd.grad(found, x, do), torch.autograd.grad(expected, x, do), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert calls.ran == {"cpu": 1}


def test_lse_and_scale_are_tilewises(active):
    x = operands()
    _, lse = attend(*x, (-1, 0), scale=0.3, return_aux=varlen.AuxRequest(lse=True))
    layout = tw.Varlen(CU, CU, 11, 11)
    expected = tw.attention(*x, mask=tw.Causal(), layout=layout, scale=0.3, return_lse=True)[1]
    assert torch.equal(lse.reshape(expected.shape), expected)


def test_what_it_has_no_name_for_is_handed_back(active):
    x = operands()
    with tw.count_calls() as calls, pytest.raises(NotImplementedError):  # PyTorch brings no such kernel for CPUs
        attend(*x, (-1, -1), seqused_k=torch.tensor([5, 0, 11], dtype=torch.int32))
    assert calls.handed_back == {"seqused_k": 1}


def test_restoring_leaves_nothing_behind():
    torch_flash.register("of-a-test", devices=("cpu",))
    flash.activate_flash_attention_impl("of-a-test")
    attend(*operands(), (-1, -1))
    flash.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        attend(*operands(), (-1, -1))


def test_a_wrong_device_is_named():
    with pytest.raises(ValueError, match="devices must be"):
        torch_flash.register(devices=("tpu",))
