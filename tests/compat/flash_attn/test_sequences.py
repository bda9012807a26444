"""Varlen functions where a part of each sequence counts, or keys are in pages: against each sequence in fp64."""

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.compat import flash_attn_interface as three
from tilewise.compat.flash_attn import cute, flash_attn_gpu, flash_attn_varlen_func

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, M, N, H, H_K, D, D_V, PAGE = 4, 5, 8, 4, 2, 16, 8, 4
USED_Q, USED_K = [3, 0, 5, 9], [8, 4, 0, 20]  # the last ones are cut to M and N
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (2, 1)}}
VALUES = {"full": tw.Full(), "causal": tw.Causal(), "window": tw.Window(2, 1)}


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def starts(length):
    return torch.arange(B + 1, dtype=torch.int32, device=DEVICE) * length


def near(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)


def operands(learns=False):
    shapes = (B, M, H, D), (B, N, H_K, D), (B, N, H_K, D_V)
    return [torch.randn(*shape, device=DEVICE).requires_grad_(learns) for shape in shapes]


def one_by_one(q, k, v, rows, keys, mask, sink=None):
    """o and lse of the rows and keys in use, sequence by sequence; 0 and -inf elsewhere."""
    o, lse = q.new_zeros(B, M, H, D_V), q.new_full((B, H, M), -torch.inf)
    for b, (m, n) in enumerate(zip(rows, keys, strict=True)):
        part = [t[b : b + 1, :length] for t, length in ((q, m), (k, n), (v, n))]
        found = reference.attention(*part, mask=mask, sink=sink)
        o[b, :m], lse[b, :, :m] = found[0][0], found[1][0]
    return o, lse


def three_packed(q, k, v, used, **options):
    lengths = starts(M), starts(N), M, N
    rows = (t.flatten(0, 1) for t in (q, k, v))
    o, lse = three.flash_attn_varlen_func(*rows, *lengths, *used, return_attn_probs=True, **options)
    return o.unflatten(0, (B, M)), lse.unflatten(1, (B, M)).transpose(0, 1)


def four_padded(q, k, v, used, s_aux=None, **options):
    options["window_size"] = options.pop("window_size", (None, None))
    given = dict(zip(("seqused_q", "seqused_k"), used, strict=True))
    return cute.flash_attn_varlen_func(q, k, v, learnable_sink=s_aux, return_lse=True, **given, **options)


def four_packed(q, k, v, used, **options):
    lengths = {"cu_seqlens_q": starts(M), "cu_seqlens_k": starts(N), "max_seqlen_q": M, "max_seqlen_k": N}
    o, lse = four_padded(*(t.flatten(0, 1) for t in (q, k, v)), used, **lengths, **options)
    return o.unflatten(0, (B, M)), lse.unflatten(1, (B, M)).transpose(0, 1)


def four_padded_queries(q, k, v, used, **options):
    return four_padded(q, k.flatten(0, 1), v.flatten(0, 1), used, cu_seqlens_k=starts(N), max_seqlen_k=N, **options)


CALLS = {f.__name__: f for f in (three_packed, four_padded, four_packed, four_padded_queries)}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("which", ["q", "k", "q and k"])
@pytest.mark.parametrize("name", CALLS)
def test_rows_and_keys_in_use_and_their_gradients(name, which, kind):
    x = operands(learns=True)
    sink = torch.randn(H, device=DEVICE, requires_grad=True)
    used = ints(*USED_Q) if "q" in which else None, ints(*USED_K) if "k" in which else None
    rows = [min(m, M) for m in USED_Q] if "q" in which else [M] * B
    keys = [min(n, N) for n in USED_K] if "k" in which else [N] * B
    exact = [t.detach().double().requires_grad_() for t in (*x, sink)]
    want = one_by_one(*exact[:3], rows, keys, VALUES[kind], exact[3])
    got = CALLS[name](*x, used, s_aux=sink, **MASKS[kind])
    near(got[0], want[0])
    near(got[1], want[1])
    with torch.no_grad():  # keys are then read where they lie
        near(CALLS[name](*x, used, s_aux=sink, **MASKS[kind])[0], want[0])
    do = torch.randn_like(got[0])  # not 0 in rows that are not in use, which have no gradient
    dlse = torch.randn_like(got[1]).masked_fill(want[1].isneginf(), 0.0)
    finite = [torch.where(lse.isneginf(), 0.0, lse) for lse in (got[1], want[1])]
    found = torch.autograd.grad((got[0] * do).sum() + (finite[0] * dlse).sum(), (*x, sink))
    expected = torch.autograd.grad((want[0] * do).sum() + (finite[1] * dlse).sum(), exact)
    for a, b in zip(found, expected, strict=True):
        near(a, b)


def test_lengths_that_differ_and_rows_of_no_sequence():
    cu_q, cu_k, used = ints(0, 3, 3, 10), ints(0, 8, 20, 21), (ints(2, 0, 4), ints(5, 9, 1))
    x = [
        torch.randn(rows, heads, 16, device=DEVICE, requires_grad=True)
        for rows, heads in ((12, H), (23, H_K), (23, H_K))
    ]
    exact = [t.detach().double().requires_grad_() for t in x]
    out = three.flash_attn_varlen_func(*x, cu_q, cu_k, 7, 12, *used, causal=True)
    want = torch.zeros_like(exact[0])
    for a, m, c, n in ((0, 2, 0, 5), (3, 4, 20, 1)):
        parts = [t[None, i : i + length] for t, i, length in zip(exact, (a, c, c), (m, n, n), strict=True)]
        want[a : a + m] = reference.attention(*parts, mask=tw.Causal())[0][0]
    near(out, want)
    do = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, x, do), torch.autograd.grad(want, exact, do.double()), strict=True):
        near(a, b)


def test_the_longest_length_may_be_that_in_use():
    q, k, v = operands(learns=True)
    used = ints(2, 1, 0, 3), ints(3, 3, 3, 3)
    rows = (t.flatten(0, 1) for t in (q, k, v))
    out = three.flash_attn_varlen_func(*rows, starts(M), starts(N), 3, 3, *used).unflatten(0, (B, M))
    near(out, one_by_one(q, k, v, (2, 1, 0, 3), (3, 3, 3, 3), tw.Full())[0])


def test_the_extension_cuts_keys_in_use_to_their_sequence():
    q, k, v = operands()
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    given = starts(M), starts(N), ints(*USED_K), None, None, None, M, N, 0.0, None, False, True, -1, -1, 0.0, False
    out = flash_attn_gpu.varlen_fwd(*rows, None, *given)[0]
    near(out.unflatten(0, (B, M)), one_by_one(q, k, v, [M] * B, [min(n, N) for n in USED_K], tw.Causal())[0])


def test_chunks_of_the_keys_in_use():
    q, k, v = operands()
    out = three_packed(q, k, v, (None, ints(8, 8, 8, 8)), attention_chunk=4, causal=True)[0]
    near(out, three.flash_attn_func(q, k, v, attention_chunk=4, causal=True))
    out = three_packed(q, k, v, (None, ints(6, 6, 6, 6)), attention_chunk=4, causal=True)[0]
    near(out, three.flash_attn_func(q, k[:, :6], v[:, :6], attention_chunk=4, causal=True))
    with pytest.raises(ValueError, match="attention_chunk must be >= 0, got -4"):
        three.flash_attn_func(q, k, v, attention_chunk=-4)


def in_pages(k, v):
    table = torch.randperm(B * N // PAGE, device=DEVICE).view(B, -1).int()
    pages = [t.new_empty(B * N // PAGE, PAGE, *t.shape[2:]) for t in (k, v)]
    for page, t in zip(pages, (k, v), strict=True):
        page[table.long()] = t.unflatten(1, (-1, PAGE))
    return *pages, table


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("which", ["no", "q", "k", "q and k"])
def test_pages(which, packed):
    q, k, v = operands()
    *pages, table = in_pages(k, v)
    used = ints(*USED_Q) if "q" in which else None, ints(*USED_K) if "k" in which else None
    rows = [min(m, M) for m in USED_Q] if "q" in which else [M] * B
    keys = [min(n, N) for n in USED_K] if "k" in which else [N] * B
    want, want_lse = one_by_one(q, k, v, rows, keys, tw.Causal())
    options = {"page_table": table, "causal": True}
    if packed:
        options |= {"cu_seqlens_q": starts(M)}
    o, lse = four_padded(q.flatten(0, 1) if packed else q, *pages, used, **options)
    near(o.view_as(want), want)
    near(lse.unflatten(1, (B, M)).transpose(0, 1) if packed else lse, want_lse)


def test_as_many_pages_as_sequences():
    q, k, v = operands()
    table = torch.tensor([[2], [0], [3], [1]], dtype=torch.int32, device=DEVICE)
    o, _ = four_padded(q, k, v, (None, ints(*USED_K)), page_table=table)
    near(o, one_by_one(q, k[[2, 0, 3, 1]], v[[2, 0, 3, 1]], [M] * B, [min(n, N) for n in USED_K], tw.Full())[0])


def evaluated():
    """Calls without gradients, each as a function of tensors that may learn."""
    q, k, v = operands()
    *pages, table = in_pages(k, v)
    lengths = starts(M), starts(N), M, N
    eight = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
    sink, descale = torch.ones(H, device=DEVICE), torch.ones(B, H_K, device=DEVICE)
    return {
        "block_table": (lambda q: flash_attn_varlen_func(q, *pages, *lengths, block_table=table), q.flatten(0, 1)),
        "probabilities": (
            lambda q: flash_attn_varlen_func(q, *pages, *lengths, block_table=table, return_attn_probs=True)[1],
            q.flatten(0, 1),
        ),
        "page_table": (lambda q: four_padded(q, *pages, (None, None), page_table=table)[0], q),
        "e4m3 and a sink": (lambda sink: three.flash_attn_func(*eight, s_aux=sink), sink),
        "e4m3 and a descale": (lambda t: three.flash_attn_func(*eight, q_descale=t), descale),
        "e4m3, keys in use": (lambda t: three_packed(*eight, (None, ints(*USED_K)), k_descale=t)[0], descale),
    }


@pytest.mark.parametrize("name", evaluated())
def test_evaluation_needs_no_no_grad_and_a_backward_says_why(name):
    run, given = evaluated()[name]
    want = run(given)
    learns = given.clone().requires_grad_()
    out = run(learns)
    assert torch.equal(out, want)
    with pytest.raises(
        tw.Unsupported, match="pages and tensors in e4m3 are for inference and have no backward; gather"
    ):
        out.sum().backward()
    assert not run(learns.detach()).requires_grad
    with pytest.raises(tw.Unsupported, match="have no backward"):
        torch.func.grad(lambda t: run(t).sum())(given)


@pytest.mark.parametrize("learns", [False, True])
def test_compiled(learns):
    torch._dynamo.reset()
    x, used = operands(learns), (ints(*USED_Q), ints(*USED_K))
    compiled = torch.compile(four_packed, backend="aot_eager", fullgraph=True)
    o, want = compiled(*x, used, causal=True)[0], four_packed(*x, used, causal=True)[0]
    near(o, want)
    if learns:
        do = torch.randn_like(o)
        for a, b in zip(torch.autograd.grad(o, x, do), torch.autograd.grad(want, x, do), strict=True):
            near(a, b)


def test_compiled_pages_of_what_learns():
    torch._dynamo.reset()
    run, given = evaluated()["block_table"]
    compiled, learns = torch.compile(run, backend="aot_eager"), given.clone().requires_grad_()
    out = compiled(learns)
    near(out, run(given))
    with pytest.raises(tw.Unsupported, match="have no backward"):
        out.sum().backward()


WRONG = {
    "seqused_k must be int32 or int64 of shape \\(4,\\), got torch.int32 \\(1,\\)": (None, ints(5)),
    "seqused_q must be int32 or int64 of shape \\(4,\\), got torch.int32 \\(\\)": (torch.tensor(5).int(), None),
    "seqused_k must be .*, got torch.float32": (None, ints(1, 2, 3, 4).float()),
    "seqused_q must be .*, got int; give each": (5, None),
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_number_of_lengths_is_named(name, text):
    for learns in (False, True):
        with pytest.raises(ValueError, match=text):
            CALLS[name](*operands(learns), WRONG[text])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's offsets are read under TILEWISE_CHECK=1 alone")
def test_wrong_offsets_are_named():
    q, k, v = (t.flatten(0, 1).requires_grad_() for t in operands())
    for cu in (ints(1, 5, 10, 15, 20), ints(0, 6, 5, 15, 20), ints(0, 5, 10, 15, 21)):
        with pytest.raises(ValueError, match="cu_q must start at 0"):
            three.flash_attn_varlen_func(q, k, v, cu, starts(N), M, N, seqused_q=ints(*USED_Q))
