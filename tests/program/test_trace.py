"""Traces of 65 functions in three forms, and what they capture."""

import copy
import functools
import pickle
import statistics
import time

import numpy as np
import pytest
import torch
from program.functions import B, H, M, N, examples

from tilewise.program import Entries, apply, decode, keep, trace

AT = Entries.of(B, H, M, N)
EXAMPLES = examples()
TABLE = torch.randn(3, 5, requires_grad=True)


def held(example):
    """Return the function as a method of an object that holds the tensors."""

    class Holder:
        def __call__(self, *at):
            return example.fn(*at, *example.tensors)

    return Holder()


FORMS = {
    "captured": lambda example: (example.fn, example.tensors),
    "closure": lambda example: (example.closed, ()),
    "object": lambda example: (held(example), ()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_compute_what_functions_compute(name, form):
    example = EXAMPLES[name]
    fn, captured = FORMS[form](example)
    program, tensors, numbers = trace(fn, example.what, captured)
    assert numbers == ()
    assert {id(t) for t in tensors} == {id(t) for t in example.tensors}
    assert not captured or all(a is b for a, b in zip(tensors, captured, strict=True))
    if example.what == "mask":
        want = torch.as_tensor(example.closed(*AT[:4])).expand(B, H, M, N)
        assert torch.equal(keep(program, AT, tensors).expand(B, H, M, N), want)
        return
    S = torch.randn(B, H, M, N)
    got = apply(program, S, AT, tensors)
    assert got.dtype == S.dtype
    torch.testing.assert_close(got, example.closed(S, *AT[:4]).expand(S.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EXAMPLES)
def test_texts(name):
    """A text is the program: what it decodes to is the same, and so is what is pickled, copied, or traced anew."""
    example = EXAMPLES[name]
    program = trace(example.fn, example.what, example.tensors).program
    assert program.text.isascii()
    assert " " not in program.text
    found = decode(program.text)
    assert (found.nodes, found.outputs, found.kinds) == (program.nodes, program.outputs, program.kinds)
    assert found == program == copy.deepcopy(program) == pickle.loads(pickle.dumps(program))
    assert hash(found) == hash(program)
    assert trace(examples()[name].fn, example.what, examples()[name].tensors).program.text == program.text


def test_time_of_a_trace():
    """It takes 0.05 ms (median over the functions) on a quiet machine."""
    medians = {}
    for name, example in EXAMPLES.items():
        times = []
        for _ in range(9):
            start = time.perf_counter()
            trace(example.fn, example.what, example.tensors)
            times.append(time.perf_counter() - start)
        medians[name] = statistics.median(times) * 1e3
    slowest = max(medians, key=medians.__getitem__)
    median = statistics.median(medians.values())
    print(f"a trace takes {median:.3f} ms (median), {slowest} {medians[slowest]:.3f} ms")
    assert median < 1


def program_of(fn, *captured, what="score"):
    return trace(fn, what, captured).program


def test_a_lambda_made_anew_has_the_same_text():
    def make(width):
        return lambda b, h, i, j: (i - j).abs() < width

    assert program_of(make(3), what="mask") == program_of(make(3), what="mask")
    assert program_of(make(3), what="mask") != program_of(make(4), what="mask")


def test_a_partial_function_a_method_and_defaults():
    class Model:
        width = 4

        def near(self, b, h, i, j):
            return i - j < self.width

        @staticmethod
        def anything(*args):
            return args[2] - args[3] < 4

    def near(width, b, h, i, j):
        return i - j < width

    forms = [Model().near, Model.anything, functools.partial(near, 4), lambda b, h, i, j, width=4: i - j < width]
    assert len({program_of(form, what="mask").text for form in forms}) == 1


def test_captured_tensors_come_first_and_once():
    """Those given are in order, even if unread; those closed over follow in the order in which they are read."""
    a, b, c, d = [torch.randn(5) for _ in range(4)]
    fn = lambda s, bb, h, i, j, x, y: s + d[i] + y[i] + c[j] * d[j] + a[h]  # noqa: E731
    assert [id(t) for t in trace(fn, "score", (a, b)).tensors] == [id(t) for t in (a, b, d, c)]


def test_numbers_given_are_inputs_and_others_constants():
    fn = lambda b, h, i, j, width, rate, flag: (i - j < width) & (j * rate < 3) & flag  # noqa: E731
    program, tensors, numbers = trace(fn, "mask", (4, 0.5, True))
    assert (tensors, numbers) == ((), (4, 0.5, True))
    assert {node[1] for node in program.nodes if node[0] == "in"} == {"i", "j", "i0", "f1", "b2"}
    want = fn(*AT[:4], 4, 0.5, True)
    assert torch.equal(keep(program, AT, (), numbers), want)
    assert torch.equal(keep(program, AT, (), (2, 0.25, True)), fn(*AT[:4], 2, 0.25, True))
    assert program == trace(fn, "mask", (7, 1.5, False)).program
    assert not [node for node in program_of(lambda s, b, h, i, j: s * 4.5).nodes if node[:2] == ("in", "f0")]


def test_numbers_of_numpy_are_those_of_python():
    plain = program_of(lambda s, b, h, i, j: 2.0 * s + 3 * i - torch.where(i > j, 1.5, 0.0) + True)
    two, three, half, yes = np.float64(2.0), np.int64(3), np.float32(1.5), np.bool_(True)
    assert program_of(lambda s, b, h, i, j: two * s + three * i - torch.where(i > j, half, 0.0) + yes) == plain
    assert program_of(lambda s, b, h, i, j: s * two + i * np.array(3)) == program_of(
        lambda s, b, h, i, j: s * 2.0 + i * 3
    )
    assert trace(lambda s, b, h, i, j, x, y: s + x, "score", (two, three)).numbers == (2.0, 3)
    assert program_of(lambda s, b, h, i, j: np.exp(s) + np.power(s, 2)) == program_of(
        lambda s, b, h, i, j: torch.exp(s) + s * s
    )


def test_constants():
    """What the function makes of numbers alone is a constant, even by several functions."""
    assert program_of(lambda s, b, h, i, j: s * torch.tensor(3.0)) == program_of(lambda s, b, h, i, j: s * 3.0)
    fn = lambda s, b, h, i, j: s * (torch.full((), 2.0) * torch.arange(4)[2]).exp2()  # noqa: E731
    assert program_of(fn) == program_of(lambda s, b, h, i, j: s * 16.0)
    assert trace(fn, "score").tensors == ()


def test_what_is_computed_of_captured_tensors_alone_is_captured():
    """It is computed once, by torch; its gradient flows on by autograd."""
    slopes = torch.randn(3, requires_grad=True)
    program, tensors, _ = trace(lambda s, b, h, i, j: s + (slopes * 2).exp()[h], "score")
    assert program.loads == (2,)
    (found,) = tensors
    assert torch.equal(found, (slopes * 2).exp())
    (dslopes,) = torch.autograd.grad(found.sum(), slopes)
    torch.testing.assert_close(dslopes, 2 * (slopes * 2).exp().detach())


def test_indices():
    """Tensors may be indexed in steps, and by numbers; a whole index is a read of the tensor itself."""
    both = program_of(lambda s, b, h, i, j: s + TABLE[h, i])
    assert program_of(lambda s, b, h, i, j: s + TABLE[h][i]) == both
    assert program_of(lambda s, b, h, i, j: s + TABLE[(h, i)]) == both
    program, tensors, _ = trace(lambda s, b, h, i, j: s + TABLE[1, -1] + TABLE[1][i] + TABLE[0, h], "score")
    assert tensors[0] is TABLE
    assert len(tensors) == 2
    torch.testing.assert_close(tensors[1], TABLE[1])
    assert [node[1] for node in program.nodes if node[0] == "load"] == [0, 1, 0]
    sizes = lambda s, b, h, i, j: s * TABLE.shape[0] + (TABLE.size(1) * len(TABLE) + TABLE.dim())  # noqa: E731
    assert program_of(sizes) == program_of(lambda s, b, h, i, j: s * 3 + 17)


def test_names_may_be_bound_anew():
    def twice(s, b, h, i, j):
        s += 1
        s *= 2.0
        return s

    assert program_of(twice) == program_of(lambda s, b, h, i, j: (s + 1) * 2.0)


def test_types_as_functions_see_them():
    def fn(s, b, h, i, j):
        assert (s.dtype, i.dtype, (i > j).dtype) == (torch.float32, torch.int32, torch.bool)
        assert (s.ndim, s.shape, s.device.type, s.requires_grad) == (0, (), "cpu", False)
        return s + torch.zeros((), dtype=s.dtype, device=s.device)

    assert program_of(fn).nodes == (("in", "s"),)


def test_exceptions_of_the_function_pass_through():
    with pytest.raises(KeyError, match="missing"):
        program_of(lambda s, b, h, i, j: {}["missing"])
    with pytest.raises(AttributeError, match="no_such_method"):
        program_of(lambda s, b, h, i, j: s.no_such_method())


def test_a_trace_changes_nothing():
    """Neither the generator of random numbers nor the mode of gradients, and no mode of torch remains."""
    state = torch.get_rng_state()
    for example in EXAMPLES.values():
        trace(example.fn, example.what, example.tensors)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.rand(()).shape == ()
    assert torch.is_grad_enabled()
