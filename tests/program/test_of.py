"""Functions as masks and scores of attention, on the CPU: against plain torch in fp64."""

import copy
import io
import math
import pickle

import pytest
import torch
from program.functions import B, H, M, N, examples

import tilewise as tw
from tilewise.program import Entries

EXAMPLES = examples()
FORMS = {
    "closure": lambda example: example.closed,
    "captured": lambda example: KIND[example.what].of(example.fn, *example.tensors),
    "decorator": lambda example: KIND[example.what].of(align="first")(example.closed),
}
KIND = {"mask": tw.Mask, "score": tw.Score}
ULP = torch.finfo(torch.float32).eps
PADDED = [(M, N)] * B
PACKED = [(7, 11), (13, 9)]
"""Queries and keys of each sequence."""


def operands(lengths, H_k=1, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    rows, keys = (sum(each) for each in zip(*lengths, strict=True))
    q, k, v, do = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((rows, H, 8), (keys, H_k, 8), (keys, H_k, 8), (rows, H, 8))
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def layout_of(lengths):
    cu = [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*lengths, strict=True)]
    return tw.Varlen(*cu)


def learned(example):
    return [t for t in example.tensors if t.requires_grad]


def plain(x, lengths, example, align="first"):
    """o and gradients in torch's own operations, of packed rows; P comes from lse, as no softmax is stored."""
    *x, do = x
    outputs, row, key = [], 0, 0
    for b, (m, n) in enumerate(lengths):
        at = Entries.of(1, H, m, n)
        i = at.i if align == "first" else at.aligned
        q, k, v = x[0][row : row + m], x[1][key : key + n], x[2][key : key + n]
        S = torch.einsum("mhd,nhd->hmn", q, k.expand(n, H, 8))[None] * 8**-0.5
        if example.what == "score":
            S = example.fn(S, torch.tensor(b), at.h, i, at.j, *example.tensors)
        else:
            S = S.masked_fill(~torch.as_tensor(example.fn(torch.tensor(b), at.h, i, at.j, *example.tensors)), -math.inf)
        blind = S.isneginf().all(-1, keepdim=True)
        lse = torch.logsumexp(S.masked_fill(blind, 0.0), -1, keepdim=True)
        P = torch.exp(S.masked_fill(blind, 0.0) - lse).masked_fill(blind, 0.0)
        outputs.append(torch.einsum("hmn,nhd->mhd", P[0], v.expand(n, H, 8)))
        row, key = row + m, key + n
    o = torch.cat(outputs)
    leaves = [*x, *(learned(example) if example.what == "score" else [])]
    return [o, *torch.autograd.grad(o, leaves, do, allow_unused=True)]


def ours(x, lengths, example, value, **options):
    *x, do = x
    if lengths is PADDED:
        given = [t.unflatten(0, (B, -1)) for t in x]
        o = tw.attention(*given, **{example.what: value}, **options).flatten(0, 1)
    else:
        o = tw.attention(*x, **{example.what: value}, layout=layout_of(lengths), **options)
    leaves = [*x, *(learned(example) if example.what == "score" else [])]
    return [o, *torch.autograd.grad(o, leaves, do, allow_unused=True)]


def check(got, of_fp32, true):
    for mine, torchs, exact in zip(got, of_fp32, true, strict=True):
        if exact is None:
            assert mine is None or not mine.any()
            continue
        allowed = 4 * (torchs - exact).abs().max() + 48 * ULP * exact.abs().max()
        assert mine.shape == exact.shape
        assert (mine - exact).abs().max() <= allowed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_functions_are_as_accurate_as_plain_torch(name, form):
    example = EXAMPLES[name]
    for lengths in (PADDED, PACKED):
        x = operands(lengths)
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in x]
        true, of_fp32 = plain(wide, lengths, example.to(torch.float64)), plain(x, lengths, example)
        check(ours(x, lengths, example, FORMS[form](example)), of_fp32, true)


@pytest.mark.parametrize("lengths", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["forgetting", "relative", "causal", "sloped"])
def test_rows_may_count_from_the_last_key(name, lengths):
    """Each sequence has its own shift."""
    example, x = EXAMPLES[name], operands(lengths)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in x]
    if name == "forgetting":  # its rows index gates (B, H, N)
        example = example._replace(fn=lambda s, b, h, i, j, gates: s + torch.where(j <= i, gates[b, h, j], 0.0))
    if name == "relative":
        example = example._replace(fn=lambda s, b, h, i, j, table: s + table[h, (i - j) % N])
    true, of_fp32 = (plain(each, lengths, e, "last") for each, e in ((wide, example.to(torch.float64)), (x, example)))
    check(ours(x, lengths, example, KIND[example.what].of(example.fn, *example.tensors, align="last")), of_fp32, true)


OURS = {
    "causal": tw.Causal(),
    "window": tw.Window(3, 1),
    "open window": tw.Window(None, 2),
    "prefix": tw.Prefix(torch.tensor([3, 5])),
    "padding": tw.Padding(torch.tensor([3, 6])),
    "padding range": tw.Padding(torch.tensor([5, 8]), torch.tensor([1, 4])),
    "padding bool": tw.Padding(torch.arange(18).view(2, 9) % 3 > 0),
    "documents": tw.Documents(torch.arange(12).view(2, 6) // 4, torch.arange(18).view(2, 9) // 5),
    "dense": tw.Dense(torch.arange(54).view(6, 9) % 5 > 1),
    "dense by head": tw.Dense(torch.arange(27).view(3, 1, 9) % 5 > 1),
    "dense of nothing": tw.Dense(torch.tensor(False)),
    "spans": tw.Spans(torch.arange(6).expand(2, 6), torch.arange(6).expand(2, 6) + 3),
    "full": tw.Full(),
    "and": tw.Causal() & tw.Padding(torch.tensor([3, 6])),
}


def dense(mask):
    return mask.dense(6, 9, 2, 3).expand(2, 3, 6, 9)


@pytest.mark.parametrize("name", OURS)
def test_our_rules_say_what_our_masks_keep(name):
    mask = OURS[name]
    assert torch.equal(dense(~mask), ~dense(mask))
    assert torch.equal(dense(~~mask), dense(mask))


@pytest.mark.parametrize("name", OURS)
def test_masks_join(name):
    def near(b, h, i, j):
        return (i - j).abs() <= h

    mask, of_near = OURS[name], dense(tw.Mask.of(near))
    last = tw.Mask.of(near, align="last")
    assert torch.equal(dense(mask | near), dense(mask) | of_near)
    assert torch.equal(dense(near | mask), dense(mask) | of_near)
    assert torch.equal(dense(mask & near), dense(mask) & of_near)
    assert torch.equal(dense(near & mask), dense(mask) & of_near)
    assert torch.equal(dense(~(mask | last)), ~(dense(mask) | dense(last)))
    assert torch.equal(dense(mask | OURS["spans"] | last), dense(mask) | dense(OURS["spans"]) | dense(last))
    assert (mask & near).parts[: len(mask.parts)] == mask.parts


def test_a_joined_mask_captures_a_tensor_once_and_keeps_numbers():
    lengths = torch.tensor([2, 4])
    one = tw.Mask.of(lambda b, h, i, j, n, x, y: j < n[b] + x - y, lengths, 1, 0.5)
    two = tw.Mask.of(lambda b, h, i, j, x, n: i < n[b] * x, 2.0, lengths)
    joined = one | two
    assert (joined.given, joined.numbers) == ((lengths,), (1, 0.5, 2.0))
    assert torch.equal(dense(joined), dense(one) | dense(two))
    with pytest.raises(TypeError):
        one | 3


def test_values_are_frozen_and_equal_by_program_numbers_and_tensors():
    t = torch.randn(3)

    def make(t, x=2.0):
        return tw.Score.of(lambda s, b, h, i, j, t, x: s + t[h] * x, t, x)

    value = make(t)
    assert value == make(t)
    assert hash(value) == hash(make(t))
    assert value not in (make(t.clone()), make(t, 2), make(t, 3.0), tw.SoftCap(2.0))
    with pytest.raises(AttributeError):
        value.text = ""
    other = t.clone()
    assert value.with_(other) == make(other)
    for wrong in ((), (t, t), (t[None],), (t.int(),), (3.0,)):
        with pytest.raises((TypeError, ValueError), match=r"score <lambda> \(.*test_of.py:\d+\)"):
            value.with_(*wrong)


def test_copies_compute_the_same():
    example = EXAMPLES["relative"]
    value = tw.Score.of(example.fn, example.tensors[0].detach(), align="first")
    x = [t.detach().unflatten(0, (B, -1)) for t in operands(PADDED)[:3]]
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), loaded, value.to("cpu")):
        assert torch.equal(tw.attention(*x, score=again), tw.attention(*x, score=value))


def test_new_contents_of_captured_tensors_count():
    t = torch.zeros(H)
    value = tw.Score.of(lambda s, b, h, i, j: s * t[h])
    x = [t.detach().unflatten(0, (B, -1)) for t in operands(PADDED)[:3]]
    before = tw.attention(*x, score=value)
    t.fill_(1.0)
    assert torch.equal(tw.attention(*x, score=value), tw.attention(*x, score=tw.Score.of(lambda s, b, h, i, j: s)))
    assert not torch.equal(before, tw.attention(*x, score=value))


def test_every_function_that_takes_options_takes_functions():
    table = torch.randn(H, N + M, requires_grad=True)
    slopes = torch.rand(H, requires_grad=True)

    def near(b, h, i, j):
        return i - j <= 6

    scores = [lambda s, b, h, i, j: s + table[h, i + j], tw.SoftCap(3.0), lambda s, b, h, i, j: s * slopes[h]]
    q, k, v, do = (t.detach().unflatten(0, (B, -1)) for t in operands([(M, M)] * B, H))
    qkv = torch.stack((q, k, v), -3).requires_grad_()
    o = tw.attention_qkvpacked(qkv, mask=near, score=scores)
    by_autograd = torch.autograd.grad(o, (qkv, table, slopes), do)
    o, lse = tw.attention(q, k, v, mask=near, score=scores, return_lse=True)
    grads = tw.attention_backward(do, q, k, v, o.detach(), lse.detach(), mask=near, score=scores)
    for mine, other in zip(grads, (*by_autograd[0].unbind(-3), *by_autograd[1:]), strict=True):
        torch.testing.assert_close(mine, other)
    assert tw.explain(q, k, v, mask=near, score=scores).backend == "cpu"
    assert dense(tw.listed(near, q, k, v)).any()


def test_masks_give_no_gradients():
    noise = torch.rand(M, N, requires_grad=True)
    x = [t.unflatten(0, (B, -1)) for t in operands(PADDED)[:3]]
    o = tw.attention(*x, mask=lambda b, h, i, j: noise[i, j] < 0.5)
    assert torch.autograd.grad(o.sum(), (x[0], noise), allow_unused=True)[1] is None
    with torch.no_grad():
        assert not tw.attention(x[0], x[1], x[2], mask=lambda b, h, i, j: noise[i, j] < 0).any()


PAIRS = {
    "softcap": {"score": [tw.SoftCap(2.0), "own"]},
    "alibi after": {"score": ["own", tw.Alibi(torch.rand(H))]},
    "bias": {"score": [tw.Bias(torch.randn(H, M, N)), "own"]},
    "two functions": {"score": ["own", "own"]},
    "function mask": {"mask": lambda b, h, i, j: (i + j + b) % 3 > 0},
    "causal": {"mask": tw.Causal() & (lambda b, h, i, j: j > 0)},
    "sink": {"sink": torch.randn(H)},
    "dropout": {"dropout": 0.3, "seed": 5},
    "scale": {"scale": 0.0},
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    """A function beside another feature: as the reference, which computes whole score matrices."""
    options = dict(PAIRS[name])
    table = torch.randn(H, M + N, dtype=torch.float64)
    own = tw.Score.of(lambda s, b, h, i, j, table: torch.tanh(s) + table[h, i + j] * (b + 1), table.requires_grad_())
    options["score"] = tuple([own if one == "own" else one for one in options.get("score", ["own"])])
    options = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    q, k, v, do = (t.detach().unflatten(0, (B, -1)) for t in operands(PADDED, 3, torch.float64))
    given = dict(options) if "mask" not in options else options | {"mask": as_mask(options["mask"])}
    o, lse = tw.reference.attention(q, k, v, **given)
    wanted = tw.reference.gradients(q, k, v, do, **given)
    mine = tw.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(mine, (o, lse))
    grads = tw.attention_backward(do, q, k, v, *map(torch.Tensor.detach, mine), **options)
    captured = [g for g, t in zip(wanted.scores, tensors_of(options["score"]), strict=True) if t is not None]
    torch.testing.assert_close(list(grads), [wanted.q, wanted.k, wanted.v, *captured])


def as_mask(mask):
    return mask if isinstance(mask, tw.Mask) else tw.Mask.of(mask)


def tensors_of(scores):
    """One for each gradient of the reference: None where the call returns none."""
    return [t if t.requires_grad else None for score in scores for t in (score.tensors if score.learns else [BLANK])]


BLANK = torch.zeros(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_and_autocast(dtype):
    slopes = torch.rand(H, dtype=dtype, requires_grad=True)
    q, k, v, do = (t.detach().unflatten(0, (B, -1)) for t in operands(PADDED))

    def fn(s, b, h, i, j):
        return s - slopes[h] * (i - j).abs()

    with torch.autocast("cpu", dtype):
        o = tw.attention(q, k, v, score=fn)
        (grad,) = torch.autograd.grad(o, slopes, do.to(dtype))
    assert (o.dtype, grad.dtype) == (dtype, dtype)
    narrow = [t.to(dtype) for t in (q, k, v)]
    assert torch.equal(o, tw.attention(*narrow, score=fn))
    wide = tw.attention(*narrow, score=fn, out_dtype=torch.float32, deterministic=True)
    torch.testing.assert_close(wide.to(dtype), o, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["forgetting", "two_tables", "kerple", "gated", "hidden_at_random"])
def test_gradcheck(name):
    example = EXAMPLES[name].to(torch.float64)
    q, k, v, _ = operands(PADDED, dtype=torch.float64)
    value = tw.Score.of(example.fn, *example.tensors)

    def call(q, k, v, *tensors):
        given = [t.unflatten(0, (B, -1)) for t in (q, k, v)]
        new = iter(tensors)
        own = [next(new) if t.requires_grad else t for t in example.tensors]
        return tw.attention(*given, mask=lambda b, h, i, j: j <= i + b, score=value.with_(*own))

    assert torch.autograd.gradcheck(call, (q, k, v, *learned(example)), fast_mode=True)


def test_caches_take_rows_from_the_last_key():
    """Each sequence has its own number of keys; rows from the first are refused, with the remedy."""
    q, k, v = (torch.randn(2, rows, H, 8) for rows in (2, 9, 9))
    lengths = torch.tensor([4, 9], dtype=torch.int32)

    def near(b, h, i, j):
        return i - j <= 3 + b

    def bent(s, b, h, i, j):
        return s - (i - j) * 0.1 * (b + h)

    mask, score = tw.Mask.of(near, align="last"), tw.Score.of(bent, align="last")
    o = tw.attention(q, k, v, mask=mask & tw.Causal(), score=score, layout=tw.Cached(lengths))
    for b, n in enumerate(lengths.tolist()):
        of_b = tw.Mask.of(lambda _, h, i, j: i - j <= 3 + b, align="last")  # noqa: B023
        bent_b = tw.Score.of(lambda s, _, h, i, j: s - (i - j) * 0.1 * (b + h), align="last")  # noqa: B023
        alone = tw.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], mask=of_b & tw.Causal(), score=bent_b)
        torch.testing.assert_close(o[b : b + 1], alone)
    with pytest.raises(tw.Unsupported, match=r'near \(.*test_of.py:\d+\) does not go with Cached.*align="last"'):
        tw.attention(q, k, v, mask=near, layout=tw.Cached(lengths))
    with pytest.raises(tw.Unsupported, match="align"):
        tw.attention(q, k, v, mask=mask | OURS["spans"], layout=tw.Cached(lengths))
    tw.attention(q, k, v, score=lambda s, b, h, i, j: s * j, layout=tw.Cached(lengths))


WRONG = {
    "too few heads": ("score", lambda: tw.Score.of(lambda s, b, h, i, j, t: s + t[h], torch.zeros(H - 1)),
        r"captured tensor 1 must have a size of at least 3 in dimension 0, which h indexes, got \(2,\)"),
    "too few entries": ("mask", lambda: tw.Mask.of(lambda b, h, i, j, t: t[b, j] > 0, torch.zeros(B - 1, N)),
        r"captured tensor 1 must have a size of at least 2 in dimension 0, which b indexes, got \(1, 17\)"),
    "an option": ("mask", lambda: lambda b, h, i: i > 0, r"it must take \(b, h, i, j\)"),
    "a choice": ("score", lambda: lambda s, b, h, i, j: s if i > j else -s, "write\\s+torch.where"),
    "a number": ("mask", lambda: lambda b, h, i, j: i - j, "write x != 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_function_and_its_line(name):
    option, make, message = WRONG[name]
    x = [t.unflatten(0, (B, -1)) for t in operands(PADDED)[:3]]
    state = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError), match=rf"(?s){option} <lambda> \(.*test_of.py:\d+.*{message}"):
        tw.attention(*x, **{option: make()})
    assert torch.equal(torch.get_rng_state(), state)


def test_other_errors():
    x = [t.unflatten(0, (B, -1)) for t in operands(PADDED)[:3]]

    def near(b, h, i, j):
        return i >= j

    with pytest.raises(tw.Unsupported, match="hopper: it is written for sm_90"):
        tw.attention(*x, mask=near, backend="hopper")
    with pytest.raises(ValueError, match=r'align must be "first" or "last"'):
        tw.Mask.of(near, align="both")
    with pytest.raises(TypeError, match=r"did you mean mask=tilewise.Causal\(\)"):
        tw.attention(*x, mask=tw.Causal)
    with pytest.raises(TypeError, match="score must be a Score"):
        tw.attention(*x, score=[tw.SoftCap(2.0), 3])
    with pytest.raises(TypeError, match="must be a function"):
        tw.Mask.of(None)


def test_functions_of_one_text_have_their_own_names():
    t = torch.zeros(1, 1)

    def one(b, h, i, j):
        return t[b, h] > j

    def two(b, h, i, j):
        return t[b, h] > j

    x = [t.unflatten(0, (B, -1)) for t in operands(PADDED)[:3]]
    masks = {"one": tw.Mask.of(one), "two": tw.Mask.of(two)}
    for name in ("one", "two", "one"):
        with pytest.raises(ValueError, match=rf"mask {name} \(.*test_of.py:\d+\): captured tensor 1 must have"):
            tw.attention(*x, mask=masks[name])
