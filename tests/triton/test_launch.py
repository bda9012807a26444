"""What kernels are given: operands where they lie, offsets beyond 32 bits, and cu_seqlens that are wrong."""

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.attention.explain import problem_on
from tilewise.call.check import check_arguments
from tilewise.call.operands import Grads, Saved
from tilewise.host.arguments import adjacent
from tilewise.host.launch import Launch
from tilewise.tile.blocks import width
from tilewise.tile.rows import Packed, Rows, RowValues, rows_of
from tilewise.triton import launch
from tilewise.triton.plan import plan

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")


def gradients(q, k, v, do, **options):
    """o, lse, dq, dk and dv of the Triton back end."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o, lse = tw.attention(q, k, v, backend="triton", return_lse=True, **options)
    return o, lse, *torch.autograd.grad(o, (q, k, v), do)


@pytest.fixture
def given(monkeypatch):
    """The operands of every launch, by kernel, in the order of the kernel's arguments. Those of one tile a head would
    take these calls."""
    seen = {}
    monkeypatch.setattr("tilewise.triton.backend.single.fits", lambda *_: False)
    run = Launch.run

    def record(self, stream=None):
        seen[self.kernel.fn.__name__] = [a for a in self.arguments if isinstance(a, Rows)]
        run(self, stream)

    monkeypatch.setattr(Launch, "run", record)
    return seen


VIEWS = {
    "heads first": lambda B, S, H, D: torch.randn(B, H, S, D).transpose(1, 2),
    "packed q": lambda B, S, H, D: torch.randn(B, S, 3, H, D)[:, :, 0],
    "packed v": lambda B, S, H, D: torch.randn(B, S, 3, H, D)[:, :, 2],
    "longer rows": lambda B, S, H, D: torch.randn(B, S, H, D + 24)[..., 8 : D + 8],
    "one head for all": lambda B, S, H, D: torch.randn(B, S, 1, D).expand(B, S, H, D),
    "every other row": lambda B, S, H, D: torch.randn(B, 2 * S, H, D)[:, ::2],
}
COPIED = {
    "entries apart": lambda B, S, H, D: torch.randn(B, S, D, H).transpose(2, 3),
    "one number": lambda B, S, H, D: torch.randn(()).expand(B, S, H, D),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_operands_are_read_where_they_lie(view, given):
    make = VIEWS[view]
    q, k, v, do = make(2, 20, 2, 16), make(2, 23, 2, 16), make(2, 23, 2, 16), make(2, 20, 2, 16)
    assert all(adjacent(t) is t for t in (q, k, v, do))
    got = gradients(q, k, v, do, mask=tw.Causal())
    read = {"forward": (q, k, v), "backward_dkdv": (q, k, v, do), "backward_dq": (q, k, v, do)}
    for kernel, tensors in ((f"attention_{name}", of) for name, of in read.items()):
        for operand, t in zip(given[kernel], tensors, strict=False):
            assert operand.ptr.data_ptr() == t.data_ptr(), kernel
            assert (operand.batch, operand.row, operand.head) == t.stride()[:3], kernel
    assert given["attention_backward_delta"][1].ptr.data_ptr() == do.data_ptr()
    want = gradients(*(t.contiguous() for t in (q, k, v, do)), mask=tw.Causal())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), "the same numbers, bit for bit"
        assert not a.isnan().any()


@pytest.mark.parametrize("view", COPIED)
def test_rows_whose_entries_lie_apart_are_copied(view, given):
    make = COPIED[view]
    q, k, v, do = make(2, 20, 2, 16), make(2, 23, 2, 16), make(2, 23, 2, 16), make(2, 20, 2, 16)
    for t in (q, k, v, do):
        copy = adjacent(t)
        assert copy.is_contiguous()
        assert torch.equal(copy, t)
    got = gradients(q, k, v, do)
    assert all(operand.ptr.stride(-1) == 1 for operands in given.values() for operand in operands[:3])
    want = gradients(*(t.contiguous() for t in (q, k, v, do)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("size", [*range(1, 257), 320, 511, 512])
def test_narrow_rows_are_copied_where_they_may_begin_off_16_byte_boundaries(size):
    """Narrow are those whose blocks have fewer than 64 columns; wider ones are read where they lie."""
    narrow = width(tl.float16, size) < 64
    whole = torch.zeros(2, 20, 3, 513, dtype=torch.float16)
    off, odd = whole.flatten()[1 : 1 + 120 * size].view(2, 20, 3, size), whole[..., :size]
    for t in (off, odd):
        copy = adjacent(t)
        assert (copy is not t) == narrow
        assert torch.equal(copy, t)
        assert copy.data_ptr() % 16 == 0 or not narrow
        assert adjacent(copy) is copy
    aligned = torch.zeros(2, 20, 3, size, dtype=torch.float16)
    assert adjacent(aligned) is aligned
    in_fp32 = torch.zeros(2, 20, 3, 513)[..., :size]
    assert adjacent(in_fp32) is in_fp32


def test_a_single_entry_is_adjacent_at_any_stride():
    t = torch.randn(2, 20, 2, 16)[..., 3:4]
    assert adjacent(t) is t
    got, want = (gradients(x, x, x, x) for x in (t, t.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


FAR = {"batch": 0, "row": 1, "head": 2}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """More than 2^32 numbers in a file without blocks: memory is used only where something is written."""
    return torch.from_file(str(tmp_path_factory.mktemp("far") / "sparse"), shared=True, size=2**33 + 2**20)


@pytest.mark.parametrize("step", [2**30, 2**31 + 48], ids=["32-bit stride", "64-bit stride"])
@pytest.mark.parametrize("far", FAR)
def test_offsets_beyond_32_bits(far, step, sparse):
    """Operands whose batches, rows or heads lie so far apart that offsets, or even strides, need 64 bits."""
    shape = [2, 3, 2, 16]
    shape[FAR[far]] = 4 if step < 2**31 else 3
    near = iter((4096, 512, 64))
    stride = [step if axis == FAR[far] else next(near) for axis in range(3)]
    tensors = []
    for start in range(4):
        t = sparse.as_strided(shape, (*stride, 1), start * 16384)
        t.copy_(torch.randn(shape))
        tensors.append(t)
    assert sum((n - 1) * s for n, s in zip(shape, stride, strict=False)) >= 2**31
    got = gradients(*tensors, mask=tw.Causal())
    want = gradients(*(t.contiguous() for t in tensors), mask=tw.Causal())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() > 0.0


@pytest.mark.parametrize("kind", ["dense", "bias"])
def test_offsets_beyond_32_bits_in_masks_and_biases(kind, sparse):
    q, k, v, do = (torch.randn(1, 3, 2, 16) for _ in range(4))
    if kind == "dense":
        far = sparse.view(torch.uint8).view(torch.bool).as_strided((3, 3), (2**32 + 64, 1), 1)
        far.copy_(torch.tensor([[True, False, True], [False, True, True], [True, True, False]]))
        got, want = (gradients(q, k, v, do, mask=tw.Dense(t)) for t in (far, far.contiguous()))
        assert not torch.equal(want[0], gradients(q, k, v, do)[0])
    else:
        far = sparse.as_strided((3, 3), (2**31 + 64, 1), 99)
        far.copy_(torch.randn(3, 3))
        got, want = (gradients(q, k, v, do, score=tw.Bias(t)) for t in (far, far.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@triton.jit
def bounds(out, packed, total_q, total_k):
    """What rows_of makes of one sequence."""
    b = tl.program_id(0)
    q0, m, k0, n = rows_of(packed, b, total_q, total_k)
    tl.store(out + b * 4, q0)
    tl.store(out + b * 4 + 1, m)
    tl.store(out + b * 4 + 2, k0)
    tl.store(out + b * 4 + 3, n)


WRONG = {
    "beyond the end": [0, 9, 4096, 2**31 - 1],
    "before the start": [-7, -(2**31), 5, 20],
    "falling": [0, 15, 3, 20],
    "starts late, ends early": [4, 9, 9, 12],
    "all the same": [20, 20, 20, 20],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_rows_of_stays_inside(wrong):
    cu = torch.tensor(WRONG[wrong], dtype=torch.int32)
    out = torch.empty(3, 4, dtype=torch.int32)
    bounds[(3,)](out, Packed(cu, cu.flip(0), 2 * 20 + 1, 2 * 17 + 1), 20, 17)
    for b in range(3):
        for (start, length), ends, total in ((out[b, :2], cu, 20), (out[b, 2:], cu.flip(0), 17)):
            assert start == ends[b].clamp(0, total)
            assert start + length == ends[b + 1].clamp(int(start), total)


def test_a_sequence_ends_where_the_layout_says():
    cu = torch.tensor([0, 3, 17], dtype=torch.int32)
    out = torch.empty(2, 4, dtype=torch.int32)
    bounds[(2,)](out, Packed(cu, cu, 2 * 5 + 1, 2 * 2 + 1), 20, 20)
    assert out.tolist() == [[0, 3, 0, 2], [3, 5, 3, 2]]


def described(q, k, v, layout):
    """The problem of a causal call, and its operands."""
    x, *rest = check_arguments(q, k, v, tw.Causal(), (), None, None, 0.0, layout, None, False, "triton")
    return problem_on(x, *rest, "cpu"), x


def test_a_longest_length_that_is_too_short_cuts_sequences_off():
    """As on a GPU, where nobody reads cu_seqlens: the rest of a sequence is nobody's; gradients are those of this."""
    cu, cut = torch.tensor([0, 3, 17], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k, v, do = (torch.randn(20, 2, 16) for _ in range(4))
    p, x = described(q, k, v, tw.Varlen(cu, cu, 5, 5))
    pl = plan(p)
    saved = launch.forward(p, pl, x, None)
    found = saved.o, saved.lse.T, *launch.backward(p, pl, x, saved, do, torch.zeros_like(saved.lse))[:3]
    o, lse, *grads = gradients(q[:8], k[:8], v[:8], do[:8], mask=tw.Causal(), layout=tw.Varlen(cut, cut, 5, 5))
    for name, got, want in zip(("o", "lse", "dq", "dk", "dv"), found, (o, lse.T, *grads), strict=True):
        assert torch.equal(got[:8], want), name
        assert (got[8:] == (-torch.inf if name == "lse" else 0)).all(), name


def guarded(shape, inside):
    """A tensor in the middle of memory full of a number that is not meant to be read or written, and that memory."""
    whole = torch.full((shape[0] + 128, *shape[1:]), 1e30)
    middle = whole[64 : 64 + shape[0]]
    middle.copy_(inside)
    return middle, whole


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_cu_seqlens_touch_nothing_outside(wrong):
    """Below the checks of the front: memory around every operand and result is neither read nor written."""
    total, H, D = 20, 2, 16
    cu = torch.tensor(WRONG[wrong], dtype=torch.int32)
    (q, _), (k, _), (v, _), (do, _) = (guarded((total, H, D), torch.randn(total, H, D)) for _ in range(4))
    p, x = described(q, k, v, tw.Varlen(cu, cu, 20, 20))
    o, around_o = guarded((total, H, D), torch.zeros(total, H, D))
    lse, around_lse = guarded((1, H, total), torch.zeros(1, H, total))
    scratch = launch.empty_scratch(p, x).logs.shape
    (logs, around_logs), (delta, around_delta) = (guarded((1, *scratch), torch.zeros(1, *scratch)) for _ in range(2))
    grads = [guarded((total, H, D), torch.zeros(total, H, D)) for _ in range(3)]
    saved = Saved(o, lse[0], None)
    pl = plan(p)
    for one in launch.forward_launches(p, pl, x, saved):
        one.run()
    results = Grads(*(g for g, _ in grads), (None,) * len(x.extra))
    for one in launch.backward_launches(p, pl, x, saved, do, None, RowValues(logs[0], delta[0]), results):
        one.run()
    for inside, around in ((o, around_o), (lse, around_lse), (logs, around_logs), (delta, around_delta), *grads):
        assert (inside.nan_to_num(neginf=0.0).abs() < 1e6).all(), "nothing of what lies around was read"
        assert (around[:64] == 1e30).all(), "nothing before it was written"
        assert (around[-64:] == 1e30).all(), "nothing behind it was written"
    assert (o.abs().amax((1, 2)) > 0).any() == (wrong != "all the same")


class Compiled:
    """A compiled kernel that only tells how it was launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched = []

    def run(self, *given):
        self.launched.append(("alone", given))

    def __getitem__(self, grid):
        return lambda *given, stream: self.launched.append(("with hooks", (grid, stream, *given)))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_calls_hooks_where_there_are_some(name, monkeypatch):
    """A profiler adds to Triton's chain of calls, or puts its own function in its place."""

    @triton.jit
    def kernel(x, y):
        pass

    compiled = Compiled()
    here = Launch(kernel, 3, ("x",), {"y": 5}, {(kernel.fn, None): (compiled, (5,), None)})
    here.run(7)
    assert compiled.launched == [("alone", (3, 1, 1, 7, "function", "metadata", None, None, None, "x", 5))]

    def hook(metadata):
        """Only has to be there."""

    chain = getattr(triton.knobs.runtime, name)
    chain.add(hook)
    try:
        here.run(7)
    finally:
        chain.remove(hook)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, name, hook)
        here.run(7)
    assert compiled.launched[1:] == 2 * [("with hooks", ((3, 1, 1), 7, "x", 5))]
    here.run(7)
    assert compiled.launched[3:] == compiled.launched[:1]


def test_views_with_a_minus_of_their_own_are_read_as_what_they_are():
    q, k, v, do = negated = torch.randn(4, 1, 9, 2, 8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    plain = negated.resolve_neg()
    for found, truth in zip(gradients(q, k, v, do), gradients(*plain), strict=True):
        assert torch.equal(found, truth)
    for found, truth in zip(gradients(*plain[:3], do), gradients(*plain), strict=True):
        assert torch.equal(found, truth)
    biased = [tw.attention(*plain[:3], score=tw.Bias(t[0, :, 0, :1]), backend="triton") for t in (do, plain[3])]
    assert torch.equal(*biased)


def test_a_kernel_is_compiled_with_products_and_sums_fused(monkeypatch):
    """By its first launch, and ahead of time. Later launches find it compiled, and have no options."""

    @triton.jit
    def kernel(x, y):
        pass

    seen, compiled = [], Compiled()
    monkeypatch.setattr(type(kernel), "__getitem__", lambda *_: lambda *given, **options: seen.append((given, options)))
    kernel.warmup = lambda *given, **options: seen.append((given, options))
    one = Launch(kernel, 3, ("x",), {"y": 5}, {})
    one.run(7)
    one.compile()
    assert seen == [
        (("x",), {"y": 5, "enable_fp_fusion": True}),
        (("x",), {"y": 5, "enable_fp_fusion": True, "grid": (1,)}),
    ]
    one.compiled[kernel.fn, None] = compiled, (5,), None
    one.run(7)
    assert compiled.launched == [("alone", (3, 1, 1, 7, "function", "metadata", None, None, None, "x", 5))]
