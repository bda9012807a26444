"""attention_qkvpacked: what attention gives, without a copy on the way in or back, on both of torch's roads."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.call import calls
from tilewise.call.backend import FORWARD, load
from tilewise.call.check import check_arguments

op, op_backward = torch.ops.tilewise.attention, torch.ops.tilewise.attention_backward
COPIES = ("copy", "clone", "cat", "stack", "contiguous")


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def leaf(B=2, N=12, H=4, D=8, dtype=torch.float32):
    return draw(B, N, 3, H, D, dtype=dtype).requires_grad_()


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


VARIANTS = {
    "full": lambda: {},
    "causal": lambda: {"mask": tw.Causal()},
    "scores": lambda: {"score": [tw.SoftCap(2.0), tw.Bias(draw(4, 12, 12).requires_grad_())], "sink": draw(4)},
    "sink": lambda: {"sink": draw(4).requires_grad_(), "scale": 0.3},
    "dropout": lambda: {"dropout": 0.3, "seed": torch.tensor(5), "deterministic": True},
}


def learned(options):
    biases = [change.bias for change in options.get("score", []) if isinstance(change, tw.Bias)]
    sink = options.get("sink")
    return biases + ([sink] if sink is not None and sink.requires_grad else [])


def results(call, qkv, options):
    """o, lse, dqkv, and the gradients of what else is learned."""
    o, lse = call(qkv, **options, return_lse=True)
    return o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), [qkv, *learned(options)])


def unpacked(qkv, **options):
    return tw.attention(*qkv.unbind(-3), **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gives_what_attention_gives(variant):
    qkv, options = leaf(), VARIANTS[variant]()
    for a, b in zip(*(results(call, qkv, options) for call in (tw.attention_qkvpacked, unpacked)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_sequences(dtype):
    qkv = draw(12, 3, 4, 8, dtype=dtype).requires_grad_()
    options = {"mask": tw.Causal(), "layout": tw.Varlen(ends(0, 5, 12), ends(0, 5, 12), 7, 7)}
    for a, b in zip(*(results(call, qkv, options) for call in (tw.attention_qkvpacked, unpacked)), strict=True):
        assert torch.equal(a, b)


# ---- without a copy


@pytest.fixture(params=["cpu", "cpu-tiled", "triton"])
def backend(request, monkeypatch):
    """Each back end that runs on a CPU, and a list of the operands and gradients that pass through it."""
    name = request.param.partition("-")[0]
    if name == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter is off where there is a GPU")
    chosen = load(name)
    if name == "cpu":
        monkeypatch.setattr(chosen, "fuse", request.param == "cpu")
    seen, plan = [], chosen.plan

    def watched(problem, which):
        found = plan(problem, which)

        def run(x, *rest):
            results = found.run(x, *rest)
            seen.extend((x,) if which is FORWARD else (x, results))
            return results

        return found._replace(run=run)

    monkeypatch.setattr(chosen, "plan", watched)
    calls.forget()
    yield name, seen
    calls.forget()


def assert_parts(parts, whole):
    """q, k and v, or their gradients, are the three parts of one tensor, in its own memory."""
    for part, place in zip(parts, whole.unbind(-3), strict=True):
        assert (part.data_ptr(), part.stride(), part.shape) == (place.data_ptr(), place.stride(), place.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("varlen", [False, True])
def test_back_ends_read_and_write_one_tensor(backend, dtype, varlen):
    name, seen = backend
    qkv = leaf(B=1, N=20, dtype=dtype)
    options = {"mask": tw.Causal(), "backend": name}
    if varlen:
        qkv = qkv.detach()[0].requires_grad_()
        options["layout"] = tw.Varlen(ends(0, 8, 20), ends(0, 8, 20), 12, 12)
    (dqkv,) = torch.autograd.grad(tw.attention_qkvpacked(qkv, **options).sum(), qkv)
    forward, backward, grads = seen
    assert_parts(forward[:3], qkv)
    assert_parts(backward[:3], qkv)
    assert_parts(grads[:3], dqkv)
    assert dqkv.is_contiguous()
    assert dqkv.isfinite().all()


class Watch(TorchDispatchMode):
    """Names of the operators that copy as much as a gradient of q."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.copies = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            any(word in func.__name__ for word in COPIES)
            and isinstance(out, torch.Tensor)
            and out.numel() >= self.numel
        ):
            self.copies.append(func.__name__)
        return out


def test_autograd_copies_nothing_round_the_operators():
    """The graph between qkv and o is the operator alone, and its gradient arrives as the back end wrote it."""
    qkv = leaf()
    with Watch(qkv.numel() // 3) as packed:
        torch.autograd.grad(tw.attention_qkvpacked(qkv, mask=tw.Causal()).sum(), qkv)
    with Watch(qkv.numel() // 3) as apart:
        torch.autograd.grad(unpacked(qkv, mask=tw.Causal()).sum(), qkv)
    assert packed.copies == []
    assert apart.copies  # the derivative of unbind


def test_the_eager_graph_leads_straight_to_qkv():
    qkv = leaf()
    o = tw.attention_qkvpacked(qkv)  # its node lives as long as it does
    behind = [node for node, _ in o.grad_fn.next_functions if node is not None]
    assert [node.variable is qkv for node in behind] == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is counted exactly on a GPU only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_of_the_backward_has_one_gradient(dtype):
    peaks = {}
    for call in (tw.attention_qkvpacked, unpacked):
        qkv = torch.randn(2, 4096, 3, 16, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2):  # the second time everything is compiled
            o = call(qkv, mask=tw.Causal(), backend="triton")  # which needs no scratch to speak of
            do = torch.ones_like(o)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            grad = torch.autograd.grad(o, qkv, do)
            torch.cuda.synchronize()
            peaks[call] = torch.cuda.max_memory_allocated() - before
            del grad, o, do
    saved = peaks[unpacked] - peaks[tw.attention_qkvpacked]
    assert saved >= 0.9 * qkv.numel() * qkv.itemsize


# ---- torch's dispatcher


def operator_arguments(qkv, options):
    given = {"mask": tw.Full(), "score": (), "scale": None, "sink": None, "dropout": 0.0, "deterministic": False}
    given |= {"layout": None, "precision": None, "backend": None} | options
    seed = given.pop("seed", None)
    x, recipe, longest = check_arguments(*qkv.unbind(-3), **given)
    return qkv, None, None, list(x.extra), seed, recipe._replace(packed=True).encode(), *longest


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck(variant):
    options = VARIANTS[variant]()
    arguments = operator_arguments(leaf(), options)
    torch.library.opcheck(op, arguments)
    qkv, _, _, extra, seed, *call = arguments
    o, lse = op(*arguments)
    wanted = [any(t is known for known in learned(options)) for t in extra]
    extra = [t.detach() for t in extra]
    given = (torch.randn_like(o), None, qkv.detach(), None, None, extra, seed, o.detach(), lse.detach(), *call, wanted)
    torch.library.opcheck(op_backward, given)
    assert [g.shape for g in op_backward(*given)] == [qkv.shape, *(t.shape for t in learned(options))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_without_graph_breaks(variant):
    qkv, options = leaf(), VARIANTS[variant]()

    def call(qkv, **options):
        return tw.attention_qkvpacked(qkv * 1.0, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(*(results(run, qkv, options) for run in (call, compiled)), strict=True):
        torch.testing.assert_close(a, b)


def test_meta_tensors_give_shapes_and_strides():
    qkv = leaf(dtype=torch.float16).detach().to("meta").requires_grad_()
    o, lse = tw.attention_qkvpacked(qkv, mask=tw.Causal(), return_lse=True)
    (dqkv,) = torch.autograd.grad(o.sum(), qkv)
    assert (o.shape, lse.shape, dqkv.shape) == ((2, 12, 4, 8), (2, 4, 12), qkv.shape)
    assert o.is_contiguous()
    assert dqkv.is_contiguous()


def test_transforms():
    qkv = draw(3, 2, 12, 3, 4, 8)

    def loss(qkv, call=tw.attention_qkvpacked):
        return call(qkv, mask=tw.Causal()).square().sum()

    expected = torch.stack([torch.func.grad(lambda x: loss(x, unpacked))(x) for x in qkv])
    torch.testing.assert_close(torch.stack([torch.func.grad(loss)(x) for x in qkv]), expected)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(qkv), expected)
    mapped = torch.vmap(tw.attention_qkvpacked, 2)(qkv.movedim(0, 2))
    torch.testing.assert_close(mapped, torch.stack([tw.attention_qkvpacked(x) for x in qkv]))


def test_double_backward_and_forward_mode_are_refused():
    qkv = leaf()
    (grad,) = torch.autograd.grad(tw.attention_qkvpacked(qkv).sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(tw.attention_qkvpacked, (qkv.detach(),), (qkv.detach(),))


def test_autocast_casts_once():
    qkv = leaf()
    with torch.autocast("cpu", torch.bfloat16):
        o = tw.attention_qkvpacked(qkv)
    assert o.dtype == torch.bfloat16
    (dqkv,) = torch.autograd.grad(o.float().sum(), qkv)
    assert dqkv.dtype == torch.float32
    assert torch.equal(o, tw.attention_qkvpacked(qkv.bfloat16()))


def test_flops_are_counted_as_for_three_tensors():
    counts = []
    for call in (tw.attention_qkvpacked, unpacked):
        with FlopCounterMode(display=False) as counter:
            call(leaf()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# ---- errors

WRONG = {
    "no tensor": (lambda: tw.attention_qkvpacked([1.0]), TypeError, "qkv must be a torch.Tensor, got list"),
    "rank": (lambda: tw.attention_qkvpacked(draw(2, 3, 8)), ValueError, r"qkv .*\(B, N, 3, H, D\), got \(2, 3, 8\)"),
    "two of them": (lambda: tw.attention_qkvpacked(draw(2, 5, 2, 4, 8)), ValueError, r"qkv .*got \(2, 5, 2, 4, 8\)"),
    "no layout": (lambda: tw.attention_qkvpacked(draw(5, 3, 4, 8)), ValueError, "qkv .*layout=Varlen"),
    "padded with a layout": (
        lambda: tw.attention_qkvpacked(draw(1, 5, 3, 4, 8), layout=tw.Varlen(ends(0, 5), ends(0, 5))),
        ValueError,
        r"qkv must have shape \(T, 3, H, D\)",
    ),
    "unknown option": (lambda: tw.attention_qkvpacked(leaf(), causal=True), TypeError, "got causal; did you mean"),
    "a mask of another kind": (lambda: tw.attention_qkvpacked(leaf(), mask=True), TypeError, "mask must be a Mask"),
    "head size": (lambda: tw.attention_qkvpacked(leaf(D=520)), ValueError, "head size .*520"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument(case):
    call, kind, says = WRONG[case]
    with pytest.raises(kind, match=says):
        call()
