"""flash_attn_with_kvcache of FlashAttention-2 and -3, and parts of sequences, against what they say, written out."""

from functools import partial

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.compat import flash_attn_interface as three
from tilewise.compat.flash_attn import cute, flash_attn_gpu, flash_attn_varlen_func, flash_attn_with_kvcache
from tilewise.compat.flash_attn.cache import Cache

B, M, H, H_K, D, N, R = 3, 4, 4, 2, 16, 40, 12
LENGTHS = torch.tensor([5, 0, 30], dtype=torch.int32)


def near(a, b):
    torch.testing.assert_close(a.double(), b.double(), atol=2e-6, rtol=0)


def operands(entries=B):
    torch.manual_seed(0)
    angles = torch.randn(N + 8, R // 2)
    caches = torch.randn(2, entries, N, H_K, D)
    new = torch.randn(2, B, M, H_K, D)
    return torch.randn(B, M, H, D), caches[0], caches[1], new[0], new[1], angles.cos(), angles.sin()


def written_out(given, lengths, causal, index=None, leftpad=None, rotary=True, interleaved=True, window=None):
    """Append in place, then attend, sequence by sequence, in fp64."""
    q, k_cache, v_cache, k, v, cos, sin = given
    out = []
    for b in range(B):
        entry, n = int(index[b]) if index is not None else b, int(lengths[b])
        q_b, k_b = q[b : b + 1], k[b : b + 1]
        if rotary:
            k_b = tw.rotary(k_b, cos, sin, interleaved=interleaved, offsets=n)
            rows = torch.arange(M) if causal or window else torch.zeros(M, dtype=torch.int64)
            q_b = tw.rotary(q_b.transpose(0, 1), cos, sin, interleaved=interleaved, offsets=n + rows).transpose(0, 1)
        k_cache[entry, n : n + M], v_cache[entry, n : n + M] = k_b[0], v[b]
        start = int(leftpad[b]) if leftpad is not None else 0
        keys, values = (t[None, entry, start : n + M].double() for t in (k_cache, v_cache))
        mask = tw.Window(window, 0) if window else tw.Causal() if causal else tw.Full()
        out.append(reference.attention(q_b.double(), keys, values, mask=mask)[0])
    return torch.cat(out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("function", [flash_attn_with_kvcache, three.flash_attn_with_kvcache])
def test_append_turns_queries_as_the_mask_says(function, causal, interleaved):
    given = operands()
    want_caches = [t.clone() for t in given[1:3]]
    want = written_out((given[0], *want_caches, *given[3:]), LENGTHS, causal, interleaved=interleaved)
    q, k_cache, v_cache, k, v, cos, sin = given
    out, lse = function(q, k_cache, v_cache, k=k, v=v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS,
                        causal=causal, rotary_interleaved=interleaved, return_softmax_lse=True)  # fmt: skip
    near(out, want)
    assert lse.shape == (B, H, M)
    near(k_cache, want_caches[0])
    assert torch.equal(v_cache, want_caches[1])


def test_a_window_turns_queries_one_by_one_and_nothing_is_turned_by_default():
    for rotary in (True, False):
        given = operands()
        want = written_out((given[0], *(t.clone() for t in given[1:3]), *given[3:]), LENGTHS, False, window=3,
                           rotary=rotary)  # fmt: skip
        angles = {"rotary_cos": given[5], "rotary_sin": given[6]} if rotary else {}
        near(flash_attn_with_kvcache(*given[:5], cache_seqlens=LENGTHS, window_size=(3, 0), **angles), want)


def test_index_leftpad_and_an_int_for_all():
    given, index = operands(5), torch.tensor([4, 0, 2], dtype=torch.int32)
    leftpad = torch.tensor([2, 0, 7], dtype=torch.int32)
    want = written_out((given[0], *(t.clone() for t in given[1:3]), *given[3:]), LENGTHS, True, index, leftpad, False)
    out = flash_attn_with_kvcache(*given[:5], cache_seqlens=LENGTHS, cache_batch_idx=index, cache_leftpad=leftpad,
                                  causal=True)  # fmt: skip
    near(out, want)
    q, k_cache, v_cache = operands()[:3]
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, causal=True)
    near(out, tw.attention(q, k_cache[:, :9], v_cache[:, :9], mask=tw.Causal()))
    near(flash_attn_with_kvcache(q, k_cache, v_cache), tw.attention(q, k_cache, v_cache))


@pytest.mark.parametrize("function", [flash_attn_with_kvcache, three.flash_attn_with_kvcache])
def test_pages(function):
    given = operands()
    want = written_out((given[0], *(t.clone() for t in given[1:3]), *given[3:]), LENGTHS, True)
    table = torch.randperm(B * N // 8).view(B, -1).int()
    pages = [torch.empty(B * N // 8, 8, H_K, D) for _ in range(2)]
    for page, flat in zip(pages, given[1:3], strict=True):
        page[table.long()] = flat.view(B, -1, 8, H_K, D)
    name = "block_table" if function is flash_attn_with_kvcache else "page_table"
    out = function(given[0], *pages, k=given[3], v=given[4], rotary_cos=given[5], rotary_sin=given[6],
                   cache_seqlens=LENGTHS, causal=True, **{name: table})  # fmt: skip
    near(out, want)


@pytest.mark.parametrize("rotary", [False, True])
def test_pages_with_index_and_leftpad_of_flash_attention_3(rotary):
    given, index = operands(5), torch.tensor([4, 0, 2], dtype=torch.int32)
    leftpad = torch.tensor([2, 0, 7], dtype=torch.int32)
    flat = [t.clone() for t in given[1:3]]
    want = written_out((given[0], *flat, *given[3:]), LENGTHS, True, index, leftpad, rotary)
    table = torch.randperm(5 * N // 8).view(5, -1).int()
    pages = [t.new_empty(5 * N // 8, 8, H_K, D) for t in given[1:3]]
    for page, t in zip(pages, given[1:3], strict=True):
        page[table.long()] = t.unflatten(1, (-1, 8))
    angles = {"rotary_cos": given[5], "rotary_sin": given[6]} if rotary else {}
    options = {"cache_batch_idx": index, "cache_leftpad": leftpad, "causal": True}
    call = partial(three.flash_attn_with_kvcache, given[0], *pages, page_table=table, **options)
    near(call(*given[3:5], cache_seqlens=LENGTHS, **angles), want)
    for page, t in zip(pages, flat, strict=True):  # the new keys and values are in the pages of their sequences
        near(page[table.long()].flatten(1, 2), t)
    near(call(cache_seqlens=12), three.flash_attn_with_kvcache(given[0], *flat, cache_seqlens=12, **options))


def test_packed_queries_and_new_keys_of_flash_attention_3():
    for causal in (True, False):
        given = operands()
        want = written_out((given[0], *(t.clone() for t in given[1:3]), *given[3:]), LENGTHS, causal)
        q, k_cache, v_cache, k, v, cos, sin = given
        cu = torch.arange(B + 1, dtype=torch.int32) * M
        options = {"cache_seqlens": LENGTHS, "causal": causal, "cu_seqlens_q": cu, "max_seqlen_q": M}
        out, lse = three.flash_attn_with_kvcache(
            q.flatten(0, 1), k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), rotary_cos=cos, rotary_sin=sin,
            cu_seqlens_k_new=cu.clone(), rotary_seqlens=LENGTHS, return_softmax_lse=True, **options
        )  # fmt: skip
        near(out, want.flatten(0, 1))
        assert lse.shape == (H, B * M)


def test_the_extension_takes_it_by_position():
    given = operands()
    want = written_out((given[0], *(t.clone() for t in given[1:3]), *given[3:]), LENGTHS, True)
    rest = None, None, None, None, None, None, True, -1, -1, 0.0, True, 0
    out, _ = flash_attn_gpu.fwd_kvcache(*given[:5], LENGTHS, *given[5:], *rest)
    near(out, want)


def test_varlen_with_pages_and_with_parts_in_use():
    q, k = torch.randn(7, H, D), torch.randn(20, H_K, D)
    v, used = torch.randn(20, H_K, D), torch.tensor([5, 9], dtype=torch.int32)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 7], [0, 8, 20]))
    parts = [
        tw.attention(q[None, a:b], k[None, c : c + n], v[None, c : c + n], mask=tw.Causal(), return_lse=True)
        for a, b, c, n in ((0, 3, 0, 5), (3, 7, 8, 9))
    ]
    want, want_lse = torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)
    out = three.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 12, seqused_k=used, causal=True, return_attn_probs=True)
    near(out[0], want)
    near(out[1], want_lse)
    args = cu_q, cu_k, used, None, None, None, 4, 12, 0.0, None, False, True, -1, -1, 0.0, False
    near(flash_attn_gpu.varlen_fwd(q, k, v, None, *args)[0], want)
    near(cute.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=4, seqused_k=used,
                                     causal=True)[0], want)  # fmt: skip
    pages, table = (
        [torch.randn(6, 4, H_K, D) for _ in range(2)],
        torch.tensor([[5, 3, 1], [0, 2, 4]], dtype=torch.int32),
    )
    lengths = torch.tensor([0, 7, 18], dtype=torch.int32)
    out = flash_attn_varlen_func(q, *pages, cu_q, lengths, 4, 11, causal=True, block_table=table)
    layout = tw.Cached(lengths.diff(), table, cu_q=cu_q)
    assert torch.equal(out, tw.attention(q, *pages, mask=tw.Causal(), layout=layout))
    assert torch.equal(out, cute.flash_attn_varlen_func(q, *pages, cu_seqlens_q=cu_q, cu_seqlens_k=lengths, causal=True,
                                                        max_seqlen_q=4, page_table=table)[0])  # fmt: skip


WRONG = {
    "k and v must be given together, got no v": {"k": 3},
    "k and v must be given together, got no k": {"v": 3},
    "rotary_cos and rotary_sin must be given together, got no rotary_cos": {"k": 3, "v": 4, "rotary_sin": 6},
    "rotary_cos must be None without k": {"rotary_cos": 5, "rotary_sin": 6},
    "cache_seqlens must be given with k": {"k": 3, "v": 4, "cache_seqlens": None},
}


@pytest.mark.parametrize("text", WRONG)
def test_what_flash_attention_refuses_is_refused(text):
    given = operands()
    options = {name: at if at is None else given[at] for name, at in WRONG[text].items()}
    with pytest.raises(ValueError, match=text):
        flash_attn_with_kvcache(*given[:3], **{"cache_seqlens": LENGTHS, **options})


def test_pages_of_flash_attention_2_go_with_neither_index_nor_leftpad():
    q, k_cache, v_cache = operands()[:3]
    given = LENGTHS, None, None, None, LENGTHS, LENGTHS[:, None], None, None, None, False, -1, -1, 0.0, True, 0
    with pytest.raises(ValueError, match="leftpad_k must be None with block_table"):
        flash_attn_gpu.fwd_kvcache(q, k_cache, v_cache, None, None, *given)
    for name in ("cache_batch_idx", "cache_leftpad"):
        with pytest.raises(ValueError, match=f"{name} must be None with block_table"):
            flash_attn_with_kvcache(q, k_cache, v_cache, block_table=LENGTHS[:, None], **{name: LENGTHS})
    assert Cache(k_cache, v_cache, None).table is None
