"""Bad input: the exception's type, and that its message names the argument, what it got and what is allowed."""

import pytest
import torch

import tilewise as tw


def q(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*(shape or (2, 5, 4, 8)), dtype=dtype, device=device)


def k(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*(shape or (2, 7, 2, 8)), dtype=dtype, device=device)


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def call(q_=None, k_=None, v_=None, **options):
    k_ = k() if k_ is None else k_
    return lambda: tw.attention(q() if q_ is None else q_, k_, k_ if v_ is None else v_, **options)


def packed(cu_q, cu_k, max_q=None, max_k=None, **options):
    return call(q(5, 2, 8), k(7, 2, 8), layout=tw.Varlen(cu_q, cu_k, max_q, max_k), **options)


WRONG = {
    "q is no tensor": (call([[1.0]]), TypeError, ["q", "list", "torch.Tensor"]),
    "rank of q": (call(q(5, 4, 8)), ValueError, ["q", "(5, 4, 8)", "(batch, length, heads, head size)", "Varlen"]),
    "rank of k": (call(k_=k(2, 7, 2, 8, 1)), ValueError, ["k", "(2, 7, 2, 8, 1)", "(batch, length, heads, head size)"]),
    "rank of v": (call(v_=k(2, 7, 16)), ValueError, ["v", "(2, 7, 16)", "(batch, length, heads, head size)"]),
    "rank of packed q": (
        lambda: tw.attention(q(1, 5, 2, 8), k(7, 2, 8), k(7, 2, 8), layout=tw.Varlen(ends(0, 5), ends(0, 7))),
        ValueError,
        ["q", "(1, 5, 2, 8)", "(T, heads, head size)"],
    ),
    "batch": (call(k_=k(3, 7, 2, 8)), ValueError, ["q, k and v", "batch", "2, 3, 3"]),
    "batch of v": (call(v_=k(3, 7, 2, 8)), ValueError, ["q, k and v", "batch", "2, 2, 3"]),
    "keys and values": (call(v_=k(2, 6, 2, 8)), ValueError, ["k and v", "(2, 7, 2, 8)", "(2, 6, 2, 8)"]),
    "heads of v": (call(v_=k(2, 7, 1, 8)), ValueError, ["k and v", "(2, 7, 2, 8)", "(2, 7, 1, 8)"]),
    "head size of k": (call(k_=k(2, 7, 2, 9)), ValueError, ["q and k", "head size", "8", "9"]),
    "heads not a multiple": (call(k_=k(2, 7, 3, 8)), ValueError, ["heads", "multiple", "4", "3"]),
    "too many queries": (call(q(1, 1, 1, 8).expand(1, 2**30, 1, 8), k(1, 7, 1, 8)), ValueError, ["q", "2^30", "split"]),
    "too many keys": (call(q(1, 5, 1, 8), k(1, 1, 1, 8).expand(1, 2**30, 1, 8)), ValueError, ["k and v", "2^30"]),
    "max_k too large": (packed(ends(0, 5), ends(0, 7), 5, 2**30), ValueError, ["k and v", "2^30", "1073741824"]),
    "no key heads": (call(k_=k(2, 7, 0, 8)), ValueError, ["heads", "multiple", "4", "0"]),
    "no query heads": (call(q(2, 5, 0, 8)), ValueError, ["heads", "multiple", "0", "2", "some"]),
    "sparse q": (call(q().to_sparse()), ValueError, ["q", "strided", "torch.sparse_coo", "Varlen"]),
    "sparse k": (call(k_=k().to_sparse(), v_=k()), ValueError, ["k", "strided", "torch.sparse_coo", ".to_dense()"]),
    "sparse v": (call(v_=k().to_sparse()), ValueError, ["v", "strided", "torch.sparse_coo", ".to_dense()"]),
    "sparse sink": (call(sink=torch.ones(4).to_sparse()), TypeError, ["sink", "strided", "torch.sparse_coo"]),
    "sparse bias": (
        lambda: tw.Bias(torch.ones(5, 7).to_sparse()),
        ValueError,
        ["Bias: bias", "strided", "torch.sparse_coo", ".to_dense()"],
    ),
    "sparse lengths": (
        lambda: tw.Padding(torch.tensor([1, 2]).to_sparse()),
        ValueError,
        ["Padding: lengths", "strided", "torch.sparse_coo"],
    ),
    "sparse keys": (
        lambda: tw.Padding(torch.ones(2, 7).bool().to_sparse()),
        ValueError,
        ["Padding", "strided", "torch.sparse_coo"],
    ),
    "sparse offsets": (
        lambda: tw.Varlen(ends(0, 5).to_sparse(), ends(0, 5)),
        ValueError,
        ["Varlen: cu_q", "strided", "torch.sparse_coo"],
    ),
    "a mask of the user's": (
        call(mask=type("Mine", (tw.Causal,), {})()),
        TypeError,
        ["Mine", "Dense", "CONTRIBUTING.md"],
    ),
    "a mask of no kind": (call(mask=tw.Mask()), TypeError, ["Mask", "Dense"]),
    "a score of no kind": (call(score=tw.Score()), TypeError, ["Score", "Bias"]),
    "mixed types": (
        call(k_=k(dtype=torch.float16)),
        TypeError,
        ["q", "k", "float32", "float16", "one type", "convert"],
    ),
    "mixed types of v": (call(v_=k(dtype=torch.float64)), TypeError, ["q", "v", "float32", "float64", "one type"]),
    "mixed devices": (call(k_=k(device="meta")), ValueError, ["one device", "cpu", "meta"]),
    "integers": (call(q(dtype=torch.int64)), TypeError, ["q", "int64", "fp16, bf16, fp32 or fp64", ".to("]),
    "head size over 576": (
        call(q(2, 5, 4, 577), k(2, 7, 2, 577)),
        ValueError,
        ["head size", "577", "between 1 and 576", "split or pad"],
    ),
    "head size of v over 512": (call(v_=k(2, 7, 2, 600)), ValueError, ["head size of v", "600", "between 1 and 512"]),
    "head size 0": (call(q(2, 5, 4, 0), k(2, 7, 2, 0)), ValueError, ["head size", "0", "between 1 and 576"]),
    "huge scale": (call(scale=1e39), ValueError, ["scale", "1e+39", "2^126"]),
    "negative scale": (call(scale=-0.5), ValueError, ["scale", "-0.5", ">= 0"]),
    "NaN scale": (call(scale=float("nan")), ValueError, ["scale", "nan", "finite"]),
    "infinite scale": (call(scale=float("inf")), ValueError, ["scale", "inf", "finite"]),
    "scale no number": (call(scale="1"), TypeError, ["scale", "'1'", "number"]),
    "dropout 1": (call(dropout=1.0), ValueError, ["dropout", "1.0", "[0, 1)"]),
    "dropout negative": (call(dropout=-0.1), ValueError, ["dropout", "-0.1", "[0, 1)"]),
    "dropout NaN": (call(dropout=float("nan")), ValueError, ["dropout", "nan", "[0, 1)"]),
    "dropout no number": (call(dropout=None), TypeError, ["dropout", "None", "number"]),
    "seed no integer": (call(dropout=0.1, seed=1.5), TypeError, ["seed", "1.5", "int"]),
    "seed too large": (call(dropout=0.1, seed=2**64), ValueError, ["seed", str(2**64), "64 bits"]),
    "seed of a wrong type": (call(dropout=0.1, seed=torch.tensor(1.0)), TypeError, ["seed", "float32", "int64"]),
    "seed of a wrong shape": (
        call(dropout=0.1, seed=torch.zeros(2).long()),
        TypeError,
        ["seed", "(2,)", "scalar int64"],
    ),
    "seed elsewhere": (
        call(dropout=0.1, seed=torch.zeros((), dtype=torch.int64, device="meta")),
        ValueError,
        ["seed", "meta", "cpu", ".to("],
    ),
    "sink shape": (call(sink=torch.zeros(3)), ValueError, ["sink", "(3,)", "(H,) = (4,)"]),
    "sink type": (call(sink=torch.zeros(4).half()), TypeError, ["sink", "float16", "fp32"]),
    "sink no tensor": (call(sink=1.0), TypeError, ["sink", "float", "(H,)"]),
    "sink elsewhere": (call(sink=torch.zeros(4, device="meta")), ValueError, ["sink", "meta", "cpu", ".to("]),
    "mask no Mask": (call(mask="causal"), TypeError, ["mask", "'causal'", "did you mean mask=tilewise.Causal()?"]),
    "mask a tensor": (
        call(mask=torch.ones(5, 7).bool()),
        TypeError,
        ["mask", "torch.bool", "(5, 7)", "mask=tilewise.Dense(...)", "score=tilewise.Bias(...)"],
    ),
    "mask a class": (call(mask=tw.Causal), TypeError, ["mask", "class", "mask=tilewise.Causal()?"]),
    "mask a function": (
        call(mask=lambda i, j: i >= j),
        TypeError,
        ["mask", "test_errors.py", "must take (b, h, i, j)", "(i, j)", "close over"],
    ),
    "mask True": (call(mask=True), TypeError, ["mask", "True", "combined with &", "mask=tilewise.Dense(...)"]),
    "mask None": (call(mask=None), TypeError, ["mask", "None", "leave it out"]),
    "causal": (call(causal=True), TypeError, ["attention", "got causal", "did you mean mask=tilewise.Causal()?"]),
    "is_causal": (call(is_causal=True), TypeError, ["attention", "is_causal", "mask=tilewise.Causal()", "aligns"]),
    "attn_mask": (call(attn_mask=None), TypeError, ["attn_mask", "tilewise.Dense(attn_mask)", "Bias(attn_mask)"]),
    "dropout_p": (call(dropout_p=0.1), TypeError, ["attention", "dropout_p", "dropout=", "evaluation"]),
    "window_size": (call(window_size=(3, 0)), TypeError, ["window_size", "mask=tilewise.Window(left, right)"]),
    "enable_gqa": (call(enable_gqa=True), TypeError, ["enable_gqa", "leave it out", "fewer heads"]),
    "unknown": (call(masc=tw.Causal()), TypeError, ["attention", "got masc", "return_lse", "did you mean mask?"]),
    "causal for explain": (
        lambda: tw.explain(q(), k(), k(), causal=True),
        TypeError,
        ["explain", "causal", "mask=tilewise.Causal()"],
    ),
    "causal for packed q, k and v": (
        lambda: tw.attention_qkvpacked(q(2, 5, 3, 4, 8), causal=True),
        TypeError,
        ["attention_qkvpacked", "causal", "mask=tilewise.Causal()"],
    ),
    "heads before length": (
        call(q(2, 4, 5, 8), q(2, 4, 7, 8)),
        ValueError,
        ["(batch, length, heads, head size)", "scaled_dot_product_attention", ".transpose(1, 2)"],
    ),
    "heads before length, as the sink shows": (
        call(q(2, 4, 5, 8), q(2, 4, 5, 8), sink=torch.zeros(4)),
        ValueError,
        ["sink", "(5,)", "(4,)", "did you mean q.transpose(1, 2)"],
    ),
    "heads before length, as slopes show": (
        call(q(2, 4, 5, 8), q(2, 4, 5, 8), score=tw.Alibi(torch.zeros(4))),
        ValueError,
        ["Alibi: slopes", "(5,)", "(4,)", "did you mean q.transpose(1, 2)"],
    ),
    "heads before length, as a mask shows": (
        call(q(2, 4, 6, 8), q(2, 4, 6, 8), mask=tw.Dense(torch.ones(6, 6).bool())),
        ValueError,
        ["Dense: seen", "(2, 6, 4, 4)", "(6, 6)", "did you mean q.transpose(1, 2)"],
    ),
    "score a string": (
        call(score="softcap"),
        TypeError,
        ["score", "'softcap'", "did you mean score=tilewise.SoftCap(...)?"],
    ),
    "score no Score": (call(score=["softcap"]), TypeError, ["score", "'softcap'", "SoftCap"]),
    "score a tensor": (call(score=torch.zeros(5, 7)), TypeError, ["score", "float32", "(5, 7)", "tilewise.Bias(...)"]),
    "scores of a tensor": (call(score=[torch.zeros(5, 7)]), TypeError, ["score", "Bias"]),
    "layout no Varlen": (call(layout=(ends(0, 5), ends(0, 7))), TypeError, ["layout", "Varlen"]),
    "Dense that does not broadcast": (
        call(mask=tw.Dense(torch.ones(5, 6).bool())),
        ValueError,
        ["Dense", "(5, 6)", "(2, 4, 5, 7)"],
    ),
    "Bias that does not broadcast": (
        call(score=tw.Bias(torch.zeros(3, 5, 7))),
        ValueError,
        ["Bias", "(3, 5, 7)", "(2, 4, 5, 7)"],
    ),
    "Bias elsewhere": (call(score=tw.Bias(torch.zeros(5, 7, device="meta"))), ValueError, ["Bias", "meta", "cpu"]),
    "Prefix of another batch": (call(mask=tw.Prefix(torch.tensor([1, 2, 3]))), ValueError, ["Prefix", "(3,)", "(2,)"]),
    "Prefix too long": (call(mask=tw.Prefix(torch.tensor([1, 8]))), ValueError, ["Prefix", "lengths", "[1, 8]"]),
    "Padding negative": (call(mask=tw.Padding(torch.tensor([-1, 2]))), ValueError, ["Padding", "lengths", "[-1, 2]"]),
    "Padding of other keys": (
        call(mask=tw.Padding(torch.ones(2, 5).bool())),
        ValueError,
        ["Padding", "(2, 5)", "(2, 7)"],
    ),
    "Documents of other queries": (
        call(mask=tw.Documents(torch.zeros(2, 6).long(), torch.zeros(2, 7).long())),
        ValueError,
        ["Documents", "q_ids", "(2, 6)", "(2, 5)"],
    ),
    "Alibi of other heads": (call(score=tw.Alibi(torch.ones(2))), ValueError, ["Alibi", "(2,)", "(4,)", "(2, 4)"]),
    "Blocks of other heads": (
        call(mask=tw.Blocks(torch.zeros(1, 3, 1, 2).long(), 16)),
        ValueError,
        ["Blocks", "lists", "(1, 3, 1, 2)", "4"],
    ),
    "Blocks of other rows": (
        call(mask=tw.Blocks(torch.zeros(1, 1, 2, 2).long(), 16)),
        ValueError,
        ["Blocks", "1 blocks of 16 rows"],
    ),
    "Blocks of no size": (lambda: tw.Blocks(torch.zeros(1, 1, 2, 2).long(), (16, 0)), ValueError, ["size", "(16, 0)"]),
    "Blocks of floats": (lambda: tw.Blocks(torch.zeros(1, 1, 2, 2), 16), TypeError, ["lists", "float32", "int32"]),
    "Spans of other rows": (
        call(mask=tw.Spans(*[torch.zeros(2, 4, 6, 3).long()] * 2)),
        ValueError,
        ["Spans: lo", "(2, 4, 6, 3)", "5"],
    ),
    "Spans of two shapes": (
        lambda: tw.Spans(torch.zeros(2, 4, 5, 3).long(), torch.zeros(2, 4, 5, 2).long()),
        ValueError,
        ["lo and hi"],
    ),
    "Spans of two ranks": (
        lambda: tw.Spans(torch.zeros(2, 4, 5, 3).long(), torch.zeros(2, 5).long()),
        ValueError,
        ["hi", "(2, 5)"],
    ),
    "unknown precision": (call(precision="fp8"), ValueError, ["precision", "'fp8'", "ieee", "bf16x6", "tf32"]),
    "precision of halves": (
        call(q().half(), k().half(), precision="ieee"),
        ValueError,
        ["precision", "'ieee'", "float16", "fp32"],
    ),
    "unknown back end": (call(backend="cuda"), ValueError, ["backend", "'cuda'", "triton", "cpu"]),
    "cu_q not at 0": (packed(ends(1, 5), ends(0, 7)), ValueError, ["cu_q", "[1, 5]", "start at 0"]),
    "cu_q past the end": (packed(ends(0, 6), ends(0, 7)), ValueError, ["cu_q", "[0, 6]", "end at 5 rows or before"]),
    "cu_k decreasing": (packed(ends(0, 2, 5), ends(0, 8, 7)), ValueError, ["cu_k", "[0, 8, 7]", "never decrease"]),
    "max_q too short": (packed(ends(0, 5), ends(0, 7), 4, 7), ValueError, ["cu_q", "max_q", "4", "5"]),
    "max_k too short": (packed(ends(0, 5), ends(0, 7), 5, 6), ValueError, ["cu_k", "max_k", "6", "7"]),
    "packed Prefix too long": (
        packed(ends(0, 2, 5), ends(0, 3, 7), mask=tw.Prefix(torch.tensor([4, 4]))),
        ValueError,
        ["Prefix", "lengths", "[4, 4]"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_message_names_argument_got_and_allowed(wrong):
    attempt, error, words = WRONG[wrong]
    with pytest.raises(error) as caught:
        attempt()
    assert [word for word in words if word not in str(caught.value)] == []


def test_unsupported_is_a_value_error_and_a_runtime_error():
    assert issubclass(tw.Unsupported, ValueError)
    assert issubclass(tw.Unsupported, NotImplementedError)


def test_a_compiled_call_says_what_is_unsupported():
    mask = tw.Dense(torch.ones(5, 7).bool())
    wrong = call(q(1, 5, 2, 8), k(1, 7, 2, 8), layout=tw.Cached(torch.tensor([7])), mask=mask)
    with pytest.raises((tw.Unsupported, RuntimeError), match=r"Dense.*Cached"):
        torch.compile(wrong, backend="eager", fullgraph=True)()


def test_a_forced_back_end_that_refuses_says_why():
    with pytest.raises(tw.Unsupported) as caught:
        tw.attention(*(q().double(), k().double(), k().double()), backend="triton")
    reasons = tw.explain(q().double(), k().double(), k().double(), backend="triton").refusals["triton"]
    assert reasons
    assert all(reason in str(caught.value) for reason in reasons)
    assert "leave backend out" in str(caught.value)


def test_an_error_in_a_call_leaves_the_next_call_right():
    with pytest.raises(ValueError, match="batch"):
        call(k_=k(3, 7, 2, 8))()
    assert call()().shape == (2, 5, 4, 8)


def test_explain_says_the_same():
    with pytest.raises(ValueError, match="scale"):
        tw.explain(q(), k(), k(), scale=-1.0)
    with pytest.raises(TypeError, match="got causal; did you mean"):
        tw.explain(q(), k(), k(), causal=True)
