"""tilewise.compat.torch_flash: torch.nn.attention.varlen.varlen_attn on tilewise, sequence by sequence as SDPA."""

import inspect
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


USED = torch.tensor([3, 0, 7], dtype=torch.int32)
KNOWN = inspect.signature(varlen.varlen_attn).parameters
needs_used = pytest.mark.skipif("seqused_k" not in KNOWN, reason="this varlen_attn has no seqused_k")
needs_pages = pytest.mark.skipif("block_table" not in KNOWN, reason="this varlen_attn has no block_table")


def of_used_keys(q, k, v, window):
    """Compute each sequence over the first USED of its keys, to whose last its last query is aligned."""
    outs = []
    for (start, end), n in zip(pairwise(ENDS), USED.tolist(), strict=True):
        M = end - start
        i, j = torch.arange(M)[:, None] + n - M, torch.arange(n)
        left, right = window
        mask = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
        parts = [t[start : start + rows].transpose(0, 1)[None] for t, rows in ((q, M), (k, n), (v, n))]
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1).nan_to_num(0.0))
    return torch.cat(outs)


@needs_used
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("compiled", [False, True])
def test_only_used_keys_are_seen(active, window, compiled):
    torch._dynamo.reset()
    q, k, v = (t.detach() for t in operands())
    expected = of_used_keys(q, k, v, window)
    for (start, end), n in zip(pairwise(ENDS), USED.tolist(), strict=True):
        k[start + n : end], v[start + n : end] = torch.nan, torch.nan
    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    with tw.count_calls() as calls:
        found = call(q, k, v, window, seqused_k=USED)
    torch.testing.assert_close(found, expected)
    assert calls.ran == {"cpu": 1}


@needs_used
def test_used_keys_end_with_their_sequence(active):
    q, k, v = (t.detach() for t in operands())
    whole = CU.diff()
    expected = attend(q, k, v, (-1, 0), seqused_k=whole)
    assert torch.equal(attend(q, k, v, (-1, 0), seqused_k=whole + 3), expected)


@needs_pages
@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("window", WINDOWS)
def test_keys_come_from_pages(active, window, num_splits):
    q, k, v = (t.detach() for t in operands())
    expected = of_used_keys(q, k, v, window)
    page, table = 4, torch.tensor([[5, 0, 7], [1, 6, 2], [4, 3, 8]], dtype=torch.int32)
    pools = [torch.full((9, page, 2, 8), torch.nan) for _ in range(2)]
    for b, n in enumerate(USED.tolist()):
        for r in range(n):
            for pool, t in zip(pools, (k, v), strict=True):
                pool[table[b, r // page], r % page] = t[ENDS[b] + r]
    found, lse = varlen.varlen_attn(
        q, *pools, CU, None, 11, 12, window_size=window, enable_gqa=True, seqused_k=USED, block_table=table,
        num_splits=num_splits, return_aux=varlen.AuxRequest(lse=True),
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert lse.numel() == 16 * 4


@needs_pages
def test_one_split_gives_the_same_bits_in_any_batch(active):
    torch.manual_seed(0)
    pools = [torch.randn(40, 64, 2, 8) for _ in range(2)]
    table, used = torch.randperm(40).view(2, 20).int(), torch.tensor([1250, 1000], dtype=torch.int32)
    q = torch.randn(2, 4, 8)

    def call(first, end):
        cu = torch.arange(end - first + 1, dtype=torch.int32)
        return varlen.varlen_attn(
            q[first:end], *pools, cu, None, 1, 1280, enable_gqa=True, seqused_k=used[first:end],
            block_table=table[first:end], num_splits=1,
        )  # fmt: skip

    assert torch.equal(call(0, 2)[1:], call(1, 2))


@needs_pages
def test_what_it_has_no_name_for_is_fell_back(active):
    x = [t.detach() for t in operands()]
    table = torch.zeros(3, 1, dtype=torch.int32)
    with tw.count_calls() as calls, pytest.raises(NotImplementedError):  # PyTorch brings no such kernel for CPUs
        torch.ops.aten._flash_attention_forward(*x, CU, CU, 11, 11, 0.0, False, False, block_table=table)
    assert calls.fell_back == {"block_table without seqused_k": 1}


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
