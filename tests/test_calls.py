"""Calls like one that was checked before are not checked again, and nothing else changes."""

import gc
import weakref

import pytest
import torch

import tilewise as tw
from tilewise.attention import api, eager, reference
from tilewise.call import calls as known
from tilewise.call.backend import COMPILING
from tilewise.call.problem import Problem

SIZE = (2, 40, 4, 16)


@pytest.fixture(autouse=True)
def nothing_known():
    known.forget()
    yield
    known.forget()


def found(kind):
    """What of a kind is kept."""
    return [entry.found for entries in known.SHAPED.values() for entry in entries if isinstance(entry.found, kind)]


def operands(dtype=torch.float64, gradient=False):
    return [torch.randn(SIZE, dtype=dtype, requires_grad=gradient) for _ in range(3)]


def checks(monkeypatch):
    """Return a list to which every check of arguments appends."""
    made, check = [], api.check_arguments
    monkeypatch.setattr(api, "check_arguments", lambda *given: made.append(1) or check(*given))
    return made


def packed():
    cu = torch.tensor([0, 30, 80], dtype=torch.int32)
    return [t.flatten(0, 1) for t in operands()], tw.Varlen(cu, cu, 50, 50)


def test_the_second_call_of_a_kind_is_not_checked(monkeypatch):
    made = checks(monkeypatch)
    for gradient in (False, True, False, True):
        x = operands(gradient=gradient)
        o, lse = tw.attention(*x, mask=tw.Causal() & tw.Window(9, 0), score=(tw.SoftCap(5.0),), return_lse=True)
        wanted = reference.attention(*x, mask=tw.Window(9, 0), score=(tw.SoftCap(5.0),))
        torch.testing.assert_close(o, wanted[0])
        torch.testing.assert_close(lse, wanted[1])
        assert o.requires_grad == gradient
    assert len(made) == 2


def test_a_layout_is_known_by_its_shapes_and_lengths(monkeypatch):
    made = checks(monkeypatch)
    for _ in range(3):
        x, layout = packed()
        tw.attention(*x, layout=layout)
    assert len(made) == 1
    unread = tw.Varlen(layout.cu_q, layout.cu_k)
    for _ in range(2):
        assert torch.equal(tw.attention(*x, layout=unread), tw.attention(*x, layout=layout))
    assert len(made) == 3, "a length that is read from a tensor may change"


def test_contents_are_checked_every_time():
    x, layout = packed()
    tw.attention(*x, layout=layout)
    wrong = tw.Varlen(layout.cu_q.flip(0), layout.cu_k, 50, 50)
    with pytest.raises(ValueError, match="cu_q"):
        tw.attention(*x, layout=wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"dropout": False}, "dropout"),
        ({"scale": True}, "scale"),
        ({"scale": torch.tensor(0.25)}, "scale"),
        ({"score": [3]}, "score"),
        ({"score": 3}, "score"),
        ({"score": (tw.Causal(),), "mask": tw.Full()}, "score"),
        ({"mask": [tw.Causal()]}, "mask"),
        ({"layout": "packed"}, "layout"),
        ({"backend": ["cpu"]}, "backend"),
        ({"precision": "bf16x9"}, "precision"),
        ({"out_dtype": torch.float16}, "out_dtype"),
        ({"seed": "3"}, "seed"),
        ({"origin": 3}, "origin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_option_is_refused_after_a_right_one(wrong, named):
    x = operands()
    for _ in range(2):
        tw.attention(*x, mask=tw.Causal(), scale=1.0)
    with pytest.raises((TypeError, ValueError), match=named):
        tw.attention(*x, **{"mask": tw.Causal(), "scale": 1.0, **wrong})


def test_other_tensors_are_told_apart():
    x = operands()
    tw.attention(*x)
    with pytest.raises(ValueError, match="strided"):
        tw.attention(x[0].to_sparse(), *x[1:])
    with pytest.raises((TypeError, ValueError), match="type"):
        tw.attention(x[0].float(), *x[1:])
    with pytest.raises(ValueError, match="head size"):
        tw.attention(x[0][..., :8], *x[1:])
    o = tw.attention(x[0].transpose(1, 2).contiguous().transpose(1, 2), *x[1:])
    torch.testing.assert_close(o, tw.attention(*x))
    negated = (torch.randn(SIZE, dtype=torch.complex128).conj().imag, *x[1:])
    assert negated[0].is_neg()
    apart = torch.empty(*SIZE, 2, dtype=torch.float64)[..., 0].copy_(negated[0])
    torch.testing.assert_close(tw.attention(*negated), tw.attention(apart, *x[1:]))


@pytest.mark.parametrize("around", ["autocast", "no_grad", "vmap", "grad", "tracing"])
def test_what_surrounds_a_call_is_told_apart(around):
    x = operands(torch.float32, gradient=True)
    wanted = tw.attention(*x)
    assert len(found(known.Call)) == 1
    if around == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert tw.attention(*x).dtype == torch.bfloat16
    elif around == "no_grad":
        with torch.no_grad():
            assert not tw.attention(*x).requires_grad
    elif around == "vmap":
        o = torch.func.vmap(tw.attention)(*[t[:, None] for t in x])
        torch.testing.assert_close(o[:, 0], wanted)
    elif around == "grad":
        dq = torch.func.grad(lambda q: tw.attention(q, *x[1:]).sum())(x[0])
        torch.testing.assert_close(dq, torch.autograd.grad(wanted.sum(), x[0])[0])
    else:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            o = tw.attention(*[mode.from_tensor(t) for t in x])
        assert isinstance(o, torch._subclasses.FakeTensor)


def test_autocast_changes_what_it_casts_alone(monkeypatch):
    made = checks(monkeypatch)
    half, full = operands(torch.bfloat16), operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for x, count in ((half, 1), (half, 1), (full, 2), (full, 3)):
            assert tw.attention(*x).dtype == torch.bfloat16
            assert len(made) == count
    assert tw.attention(*full).dtype == torch.float32


def test_settings_of_torch_are_told_apart():
    x = operands(torch.float32)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for strict in (False, True):
            torch.use_deterministic_algorithms(strict)
            for matmul in ("highest", "high"):
                torch.set_float32_matmul_precision(matmul)
                tw.attention(*x)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_float32_matmul_precision("highest")
    assert {(p.recipe.deterministic, p.matmul) for p in found(Problem)} == {
        (strict, matmul) for strict in (False, True) for matmul in ("highest", "high")
    }


def test_no_tensor_is_kept_and_no_more_kinds_than_fit(monkeypatch):
    monkeypatch.setattr(known, "MOST", 4)
    padding = torch.tensor([30, 40])
    alive = weakref.ref(padding)
    x = operands()
    tw.attention(*x, mask=tw.Padding(padding))
    assert len(found(known.Call)) == 1
    for n in range(1, 11):
        tw.attention(*x, mask=tw.Window(n, 0))
        assert len(known.CALLS) <= len(known.SHAPED) <= 4
    kept = weakref.ref(x[0])
    del padding, x
    gc.collect()
    assert alive() is None
    assert kept() is None


def masks():
    return {
        "padding": (tw.Padding(torch.tensor([30, 40])), ()),
        "documents": (tw.Documents(*[torch.zeros(2, 40, dtype=torch.int32)] * 2) & tw.Causal(), ()),
        "alibi": (tw.Causal(), (tw.Alibi(torch.rand(4)),)),
        "bias": (tw.Full(), (tw.Bias(torch.randn(40, 40).double().requires_grad_()), tw.SoftCap(3.0))),
    }


@pytest.mark.parametrize("name", masks())
def test_a_value_with_tensors_is_known_by_what_it_says(monkeypatch, name):
    made = checks(monkeypatch)
    for _ in range(3):
        mask, score = masks()[name]
        x = operands(gradient=True)
        o = tw.attention(*x, mask=mask, score=score)
        wanted, _ = reference.attention(*x, mask=mask, score=score)
        torch.testing.assert_close(o, wanted)
        leaves = [*x, *(t for one in score for t in one.captured if t.requires_grad)]
        do = torch.randn_like(o)
        for got, want in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, leaves, do), strict=True):
            torch.testing.assert_close(got, want)
    assert len(made) == 1


def test_a_tensor_given_twice_is_told_apart_from_two():
    q, k, v = operands()
    for keys, values in ((k, k), (k, v), (v, k), (v, v), (k, k)):
        o = tw.attention(q, keys, values)
        torch.testing.assert_close(o, reference.attention(q, keys, values)[0])
    assert len(found(known.Call)) == 2


def test_calls_are_told_apart_without_torchs_comparison(monkeypatch):
    monkeypatch.setattr(known, "GUARDS", known.Specs)
    test_other_tensors_are_told_apart()
    known.forget()
    for around in ("autocast", "no_grad", "vmap", "grad", "tracing"):
        known.forget()
        test_what_surrounds_a_call_is_told_apart(around)
    known.forget()
    test_the_second_call_of_a_kind_is_not_checked(monkeypatch)


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_options_is_told_apart(seed):
    """Each call, after others that differ in some options, gives what it gives alone."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=draw))]

    for _ in range(40):
        gradient, dtype = pick(True, False), pick(torch.float64, torch.float32)
        x = operands(dtype, gradient)
        options = {
            "mask": pick(tw.Full(), tw.Causal(), tw.Window(9, 0), tw.Padding(torch.tensor([30, 40]))),
            "score": pick((), (tw.SoftCap(3.0),), [tw.Alibi(torch.rand(4))]), "scale": pick(None, 1, 1.0, 0.25),
            "sink": pick(None, torch.randn(4)), "return_lse": pick(True, False), "backend": pick(None, "cpu"),
            "dropout": pick(0.0, 0.25), "seed": 3, "deterministic": pick(True, False),
        }  # fmt: skip
        first = tw.attention(*x, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "find", lambda *_: None)
            alone = tw.attention(*x, **options)
        assert type(first) is type(alone)
        for one, other in zip(*((t if isinstance(t, tuple) else (t,)) for t in (first, alone)), strict=True):
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize("learns", [False, True])
def test_the_gradients_kernels_are_compiled_beside_a_forward_that_learns(learns, monkeypatch):
    begun, real = [], eager.planned

    def planned(*of):
        plan = real(*of)

        def run(*given):
            if start := COMPILING.get():  # as where a kernel must be compiled
                start()
            return plan.run(*given)

        return plan._replace(run=run, ahead=begun.append)

    monkeypatch.setattr(eager, "planned", planned)
    slopes = torch.ones(4, requires_grad=learns)
    tw.attention(*operands(gradient=learns), score=tw.Alibi(slopes))
    assert begun == [(True,)] * learns
    assert COMPILING.get() is None
