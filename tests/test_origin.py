"""origin=Origin: parts of a larger call draw its dropout, and see its Alibi, Prefix and Padding."""

from itertools import product

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.values.dropout import dropout_keep

BACKENDS = ("cpu", "triton")
B, N, H, H_K, D = 2, 160, 4, 2, 16
ROWS = ((0, 64), (64, 96), (96, 160))
COLUMNS = ((0, 64), (64, 128), (128, 160))
LENGTHS = torch.tensor([150, 70])
SLOPES = torch.tensor([0.5, 0.25, 0.03, 0.01])


def needs(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")


def operands(dtype=torch.float32):
    torch.manual_seed(2)
    return [torch.randn(B, N, heads, D, dtype=dtype) for heads in (H, H_K, H_K)]


WHOLES = {
    "alibi": {"score": tw.Alibi(SLOPES)},
    "alibi, then a cap": {"score": (tw.Alibi(SLOPES), tw.SoftCap(2.0))},
    "padding": {"mask": tw.Padding(LENGTHS)},
    "padding on both sides": {"mask": tw.Padding(LENGTHS, torch.tensor([3, 66]))},
    "prefix": {"mask": tw.Prefix(torch.tensor([30, 100]))},
    "dropout": {"dropout": 0.3, "seed": 11},
    "all": {"mask": tw.Prefix(LENGTHS), "score": tw.Alibi(SLOPES), "dropout": 0.3, "seed": 11},
}


def parts(x, do, dlse, options, backend):
    """o, lse, dq, dk and dv, of calls of some rows and some keys."""
    q, k, v = x
    dtype = {"out_dtype": torch.float32} if q.dtype == torch.bfloat16 else {}
    options = options | dtype | {"backend": backend}
    rows = {}
    for (i0, i1), (j0, j1) in product(ROWS, COLUMNS):
        cut = q[:, i0:i1], k[:, j0:j1], v[:, j0:j1]
        part = tw.attention(*cut, origin=tw.Origin(i0, j0), return_lse=True, **options)
        rows.setdefault((i0, i1), []).append(part)
    merged = [tw.merge(found) for found in rows.values()]
    o, lse = torch.cat([o for o, _ in merged], 1), torch.cat([lse for _, lse in merged], 2)
    grads = [torch.zeros_like(t) for t in x]
    for (i0, i1), (j0, j1) in product(ROWS, COLUMNS):
        cut = q[:, i0:i1], k[:, j0:j1], v[:, j0:j1]
        given = do[:, i0:i1], *cut, o[:, i0:i1].to(q.dtype), lse[:, :, i0:i1].contiguous()
        found = tw.attention_backward(*given, dlse=dlse[:, :, i0:i1], origin=tw.Origin(i0, j0), **options)
        for grad, part, at in zip(grads, found, (slice(i0, i1), slice(j0, j1), slice(j0, j1)), strict=True):
            grad[:, at] += part
    return o, lse, *grads


IN_TRITON = [(name, "triton") for name in ("padding on both sides", "all")]
"""Its interpreter is slow."""


@pytest.mark.parametrize(("name", "backend"), [*((name, "cpu") for name in WHOLES), *IN_TRITON])
def test_parts_are_parts_of_the_whole(name, backend):
    needs(backend)
    dtype = torch.float64 if backend == "cpu" else torch.float32
    x, options = operands(dtype), WHOLES[name]
    do, dlse = torch.randn(B, N, H, D, dtype=dtype), torch.randn(B, H, N, dtype=dtype)
    given = {key: value for key, value in options.items() if key != "score"}
    score = options.get("score", ())
    given["score"] = score if isinstance(score, tuple) else (score,)
    exact = [t.double() for t in x]
    o, lse = reference.attention(*exact, **given)
    dlse = dlse.masked_fill(lse.isinf(), 0.0)
    true = o, lse, *reference.gradients(*exact, do.double(), dlse.double(), **given)[:3]
    bound = 1e-12 if backend == "cpu" else 2e-5
    for mine, theirs in zip(parts(x, do, dlse, options, backend), true, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=bound * float(o.abs().max()) * 10, rtol=bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "origin", [tw.Origin(48, 64), tw.Origin(16, 128, 3, 9, 5), tw.Origin(head=2, heads=6)], ids=str
)
def test_dropout_draws_the_bits_of_the_whole(origin, backend):
    """Through V = identity, o is P with its dropped entries, and the logits are all alike."""
    needs(backend)
    M, keys = 37, 50
    q, k = torch.zeros(B, M, 3, 64), torch.zeros(B, keys, 3, 64)
    v = torch.eye(64)[:keys].expand(B, 3, keys, 64).transpose(1, 2)
    o = tw.attention(q, k, v, dropout=0.4, seed=7, origin=origin, backend=backend)[..., :keys]
    b, h = torch.arange(B) + origin.batch, torch.arange(3) + origin.head
    matrix = (b[:, None] * (origin.heads or 3) + h)[:, :, None, None]
    i, j = torch.arange(M)[:, None] + origin.row, torch.arange(keys)[None, :] + origin.column
    keep = dropout_keep(7, matrix, i, j, 0.4)
    assert torch.equal(o.transpose(1, 2) > 0.0, keep)


def test_the_cpu_takes_any_origin_and_kernels_refuse_others_by_name():
    q, k = torch.zeros(1, 20, 1, 64), torch.zeros(1, 30, 1, 64)
    v = torch.eye(64)[:30][None, :, None]
    origin = tw.Origin(5, 7)
    o = tw.attention(q, k, v, dropout=0.4, seed=7, origin=origin)[0, :, 0, :30]
    i, j = torch.arange(20)[:, None] + 5, torch.arange(30)[None, :] + 7
    assert torch.equal(o > 0.0, dropout_keep(7, torch.tensor([[0]]), i, j, 0.4))
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(tw.Unsupported, match="row 5 and column 7; choose multiples"):
        tw.attention(q, k, v, dropout=0.4, seed=7, origin=origin, backend="triton")
    assert tw.attention(q, k, v, origin=origin, backend="triton").shape == (1, 20, 1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_tensor_parallelism_are_the_whole_s_bit_by_bit(dtype):
    x = [t.requires_grad_() for t in operands(dtype)]
    options = {"mask": tw.Causal(), "dropout": 0.2, "seed": 3}
    whole = tw.attention(*x, score=tw.Alibi(SLOPES), **options)
    do = torch.randn_like(whole)
    grads = torch.autograd.grad(whole, x, do)
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1), slice(rank, rank + 1)
        own = [t.detach()[:, :, at].requires_grad_() for t, at in zip(x, heads, strict=True)]
        origin = tw.Origin(head=2 * rank, heads=H)
        o = tw.attention(*own, score=tw.Alibi(SLOPES[heads[0]]), origin=origin, **options)
        assert torch.equal(o, whole[:, :, heads[0]])
        found = torch.autograd.grad(o, own, do[:, :, heads[0]])
        assert all(torch.equal(g, t[:, :, at]) for g, t, at in zip(found, grads, heads, strict=True))


def test_the_compiler_and_packed_sequences_take_an_origin():
    x, origin = operands(), tw.Origin(16, 64, 1, 8)
    options = {"score": tw.Alibi(SLOPES), "dropout": 0.2, "seed": 5, "origin": origin}
    compiled = torch.compile(lambda q, k, v: tw.attention(q, k, v, **options), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*x), tw.attention(*x, **options))
    cu = torch.tensor([0, N], dtype=torch.int32)
    own = [t[:1] for t in x]
    packed = [t[0] for t in own]
    kept = {"dropout": 0.2, "seed": 5, "origin": tw.Origin(head=1, heads=8)}
    assert torch.equal(tw.attention(*packed, layout=tw.Varlen(cu, cu), **kept), tw.attention(*own, **kept)[0])


def test_who_takes_a_place_on_a_gpu():
    pytest.importorskip("triton", reason="Triton is not installed")
    q = torch.empty(2, 512, 8, 128, dtype=torch.bfloat16)
    origin = tw.Origin(64, 64, 8, 16)
    for options, runs in (
        ({}, "hopper"),
        ({"score": tw.Alibi(SLOPES.repeat(2))}, "hopper"),
        ({"dropout": 0.1, "backend": "triton"}, "triton"),
        ({"dropout": 0.1}, "hopper"),
    ):
        assert tw.explain(q, q, q, origin=origin, device="sm_90", **options).backend == runs
    off = tw.explain(q, q, q, origin=tw.Origin(5, 7), device="sm_90", dropout=0.1, backend="hopper")
    assert any("row 5 and column 7; choose multiples" in reason for reason in off.refusals["hopper"])


X = torch.zeros(1, 4, 4, 8)
CU = torch.tensor([0, 4], dtype=torch.int32)
WRONG = {
    "a negative row": (lambda: tw.Origin(row=-1), ["row", "-1"]),
    "a head that is none": (lambda: tw.Origin(head=4, heads=4), ["head", "4"]),
    "a tuple": (lambda: tw.attention(X, X, X, origin=(0, 0)), ["origin", "(0, 0)"]),
    "too few heads": (lambda: tw.attention(X, X, X, origin=tw.Origin(head=2, heads=5), dropout=0.1), ["origin", "5"]),
    "packed rows": (
        lambda: tw.attention(*[X[0]] * 3, layout=tw.Varlen(CU, CU), origin=tw.Origin(row=2)), ["row=0", "got 2 and 0"],
    ),
    "a fraction": (lambda: tw.Origin(column=0.5), ["column", "0.5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_origin_is_named(name):
    attempt, words = WRONG[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        attempt()
    assert all(word in str(caught.value) for word in words), caught.value


def test_its_earlier_name_works_with_a_warning():
    x, origin = operands(), tw.Origin(16, 64, 1, 8)
    given = {"dropout": 0.2, "seed": 5}
    found = tw.attention(*x, **given, origin=origin)
    with pytest.warns(FutureWarning, match="attention: place is called origin"):
        assert torch.equal(tw.attention(*x, **given, place=origin), found)
    with pytest.warns(FutureWarning, match="explain: place is called origin"):
        assert str(tw.explain(*x, **given, place=origin)) == str(tw.explain(*x, **given, origin=origin))
    compiled = torch.compile(lambda *t: tw.attention(*t, **given, place=origin), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*x), found)
    with pytest.raises(TypeError, match="origin must be given once"):
        tw.attention(*x, **given, place=origin, origin=origin)
    with pytest.raises(TypeError, match="got plaice; "):
        tw.attention(*x, plaice=origin)
