"""torch's dispatcher: opcheck, compile, export, vmap, checkpointing, autocast, and errors for what is missing."""

import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.call import calls
from tilewise.call.backend import load
from tilewise.call.check import check_arguments
from tilewise.call.recipe import Recipe

op, op_backward = torch.ops.tilewise.attention, torch.ops.tilewise.attention_backward


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def qkv(B=2, M=12, N=16, H=4, H_k=2, D=8, D_v=8, dtype=torch.float32):
    return draw(B, M, H, D, dtype=dtype), draw(B, N, H_k, D, dtype=dtype), draw(B, N, H_k, D_v, dtype=dtype)


def packed():
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    return draw(12, 4, 8), draw(12, 2, 8), draw(12, 2, 8), tw.Varlen(ends, ends, 7, 7)


VARIANTS = {
    "full": lambda: {},
    "causal": lambda: {"mask": tw.Causal()},
    "window": lambda: {"mask": tw.Window(3, None)},
    "prefix": lambda: {"mask": tw.Prefix(torch.tensor([4, 9]))},
    "padding": lambda: {"mask": tw.Padding(torch.tensor([4, 0]))},
    "padding bool": lambda: {"mask": tw.Padding(torch.rand(2, 16) < 0.6)},
    "documents": lambda: {"mask": tw.Documents(torch.randint(2, (2, 12)), torch.randint(2, (2, 16)))},
    "dense": lambda: {"mask": tw.Dense(torch.rand(4, 12, 16) < 0.6)},
    "and": lambda: {"mask": tw.Causal() & tw.Window(5, 0) & tw.Padding(torch.tensor([9, 14]))},
    "softcap": lambda: {"score": tw.SoftCap(2.0)},
    "alibi": lambda: {"score": tw.Alibi(torch.rand(4))},
    "bias": lambda: {"score": tw.Bias(draw(4, 12, 16).requires_grad_())},
    "scores": lambda: {"score": [tw.SoftCap(2.0), tw.Bias(draw(16).requires_grad_()), tw.Alibi(torch.rand(2, 4))]},
    "sink": lambda: {"sink": draw(4).requires_grad_()},
    "dropout": lambda: {"dropout": 0.3, "seed": torch.tensor(5)},
    "scale": lambda: {"scale": 0.2},
    "deterministic": lambda: {"deterministic": True},
    "precision": lambda: {"precision": "ieee"},
}


def operator_arguments(x, options, layout=None):
    """What `attention` hands to the operator."""
    given = {"mask": tw.Full(), "score": (), "scale": None, "sink": None, "dropout": 0.0, "precision": None} | options
    seed = given.pop("seed", None)
    deterministic = given.pop("deterministic", False)
    operands, recipe, longest = check_arguments(*x, **given, layout=layout, deterministic=deterministic, backend=None)
    return *operands[:3], list(operands.extra), seed, recipe.encode(), *longest


def learned(options):
    """The tensors of a variant that have gradients."""
    score = options.get("score", ())
    score = score if isinstance(score, list) else [score]
    found = [change.bias for change in score if isinstance(change, tw.Bias)]
    return found + ([options["sink"]] if "sink" in options else [])


# ---- opcheck


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_forward(variant):
    x = [t.requires_grad_() for t in qkv()]
    torch.library.opcheck(op, operator_arguments(x, VARIANTS[variant]()))


def test_opcheck_of_the_packed_forward():
    *x, layout = packed()
    torch.library.opcheck(op, operator_arguments([t.requires_grad_() for t in x], {"mask": tw.Causal()}, layout))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_opcheck_of_the_backward(variant, through):
    options = VARIANTS[variant]()
    q, k, v, extra, seed, *call = operator_arguments(qkv(), options)
    o, lse = op(q, k, v, extra, seed, *call)
    wanted = [any(t is known for known in learned(options)) for t in extra]
    do = torch.randn_like(o) if through != "lse" else None
    dlse = torch.randn_like(lse) if through != "o" else None
    x = [t.detach() for t in (q, k, v)]
    extra = [t.detach() for t in extra]
    arguments = (do, dlse, *x, extra, seed, o.detach(), lse.detach(), *call, wanted)
    torch.library.opcheck(op_backward, arguments)
    assert len(op_backward(*arguments)) == 3 + sum(wanted)


@pytest.mark.parametrize("strides", ["heads first", "sliced", "packed", "expanded"])
def test_opcheck_of_strided_inputs(strides):
    x = {
        "heads first": lambda: tuple(draw(2, 4, 12, 8).transpose(1, 2) for _ in range(3)),
        "sliced": lambda: tuple(draw(2, 15, 4, 11)[:, 1:13, :, 3:] for _ in range(3)),
        "packed": lambda: draw(2, 12, 3, 4, 8).unbind(2),
        "expanded": lambda: (draw(2, 12, 4, 8), *(draw(1, 12, 1, 8).expand(2, 12, 4, 8) for _ in range(2))),
    }[strides]()
    q, k, v, extra, seed, *call = operator_arguments(x, {"mask": tw.Causal()})
    torch.library.opcheck(op, (q, k, v, extra, seed, *call))
    o, lse = op(q, k, v, extra, seed, *call)
    torch.library.opcheck(op_backward, (torch.ones_like(o), None, q, k, v, extra, seed, o, lse, *call, []))


# ---- both roads give the same


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operator_gives_what_the_eager_road_gives(variant):
    options = VARIANTS[variant]()
    x = [t.requires_grad_() for t in qkv()]
    leaves = [*x, *learned(options)]
    eager = tw.attention(*x, **options, return_lse=True)
    traced = op(*operator_arguments(x, options))
    cotangents = [torch.randn_like(t) for t in eager]
    results = [(*out, *torch.autograd.grad(out, leaves, cotangents)) for out in (eager, traced)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_recipe_survives_its_text():
    recipe = Recipe(mask=(("Window", 3, None),), score=(("SoftCap", 2.5),), scale=0.1, dropout=0.25, backend="cpu")
    assert Recipe.decode(recipe.encode()) == recipe


# ---- compile and export


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_without_graph_breaks_and_with_any_lengths(variant):
    options = VARIANTS[variant]()
    leaves = learned(options)

    def call(q, k, v):
        return tw.attention(q * 1.0, k, v, **options, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    lengths = [(12, 16)]
    if variant not in ("padding bool", "documents", "dense", "bias", "scores"):  # whose tensors have these lengths
        lengths.append((7, 21))
    for M, N in lengths:
        x = [t.requires_grad_() for t in qkv(M=M, N=N)]
        results = []
        for run in (call, compiled):
            out = run(*x)
            results.append((*out, *torch.autograd.grad(sum(t[t.isfinite()].sum() for t in out), [*x, *leaves])))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_compile_of_values_made_inside():
    def call(q, k, v, lengths, slopes, window):
        mask = tw.Causal() & tw.Window(window, 0) & tw.Padding(lengths)
        return tw.attention(q, k, v, mask=mask, score=[tw.SoftCap(3.0), tw.Alibi(slopes)])

    x, lengths, slopes = qkv(), torch.tensor([9, 16]), torch.rand(4)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for window in (5, 6, 7):
        arguments = (*x, lengths, slopes, window)
        torch.testing.assert_close(compiled(*arguments), call(*arguments))


def test_compile_of_packed_sequences():
    def call(q, k, v, cu):
        return tw.attention(q, k, v, mask=tw.Causal(), layout=tw.Varlen(cu, cu, 7, 7))

    *x, layout = packed()
    x = [t.requires_grad_() for t in x]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for run in (call, compiled):
        o = run(*x, layout.cu_q)
        results.append((o, *torch.autograd.grad(o.sum(), x)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_new_length_is_no_new_graph():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q: tw.attention(q, q, q, mask=tw.Causal()), dynamic=True, backend=count)
    for length in (11, 12, 31, 64):
        compiled(draw(2, length, 4, 8))
    assert len(graphs) == 1


def test_each_width_of_a_window_is_a_graph_and_the_ninth_is_one_too_many():
    def call(q, width):
        return tw.attention(q, q, q, mask=tw.Window(width, 0))

    compiled, q = torch.compile(call, fullgraph=True, backend="eager"), draw(1, 12, 1, 8)
    for width in range(2, 10):
        torch.testing.assert_close(compiled(q, width), call(q, width))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compiled(q, 10)


def test_torchs_setting_for_determinism_is_compiled_in_and_compiled_anew():
    graphs = []

    def keep(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward

    q = draw(1, 12, 1, 8)
    compiled = torch.compile(lambda q: tw.attention(q, q, q), fullgraph=True, backend=keep)
    compiled(q)
    torch.use_deterministic_algorithms(True)
    try:
        compiled(q)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    recipes = [Recipe.decode(text) for code in graphs for _, text in re.findall(r"""None, (["'])(\(.*?\))\1, """, code)]
    assert [recipe.deterministic for recipe in recipes] == [False, True]


def test_compile_draws_new_dropout_each_time():
    q = draw(1, 16, 2, 8)
    compiled = torch.compile(lambda q: tw.attention(q, q, q, dropout=0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(q), compiled(q))


INDUCTOR = """
import torch
import tilewise as tw

def call(q, k, v):
    return tw.attention(q + 1.0, k, v, mask=tw.Causal()) * 2.0

x = [torch.randn(2, 16, 4, 8, requires_grad=True) for _ in range(3)]
results = [(o := run(*x), *torch.autograd.grad(o.sum(), x)) for run in (call, torch.compile(call, fullgraph=True))]
for a, b in zip(*results, strict=True):
    torch.testing.assert_close(a, b)
print("same")
"""


def test_inductor():
    # Inductor loads setuptools, which fails where its distutils is not the first: so in a process of its own.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", INDUCTOR], capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr[-2000:]


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return tw.attention(q, k, v, mask=tw.Causal() & tw.Window(5, 0), score=tw.SoftCap(3.0))


def test_export():
    x = qkv(B=3, M=16)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(Layer(), x, dynamic_shapes=[{1: length}] * 3)
    assert any(node.target is op.default for node in program.graph.nodes)
    for n in (16, 33):
        x = qkv(B=3, M=n, N=n)
        torch.testing.assert_close(program.module()(*x), Layer()(*x))


def test_make_fx_sees_one_operator():
    graph = make_fx(lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal()))(*qkv())
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"].count(op.default) == 1


# ---- fake and meta tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_meta_tensors_give_shapes_types_and_strides(dtype):
    q, k, v = (
        t.to("meta").transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in qkv(D_v=24, dtype=dtype)
    )
    o, lse = tw.attention(q, k, v, mask=tw.Causal(), return_lse=True)
    assert (o.shape, o.dtype, o.device.type, o.is_contiguous()) == ((2, 12, 4, 24), dtype, "meta", True)
    assert (lse.shape, lse.dtype) == ((2, 4, 12), torch.float64 if dtype == torch.float64 else torch.float32)
    real = tw.attention(*qkv(D_v=24, dtype=dtype), mask=tw.Causal(), return_lse=True)
    assert [t.stride() for t in (o, lse)] == [t.stride() for t in real]
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, dtype) for t in (q, k, v)]


def test_meta_tensors_are_checked():
    with pytest.raises(ValueError, match="head size"):
        tw.attention(*(t.to("meta") for t in (draw(1, 4, 2, 8), draw(1, 4, 2, 9), draw(1, 4, 2, 9))))


def test_flops_are_counted():
    x = [t.requires_grad_() for t in qkv(D_v=24)]
    with FlopCounterMode(display=False) as forward:
        o = tw.attention(*x)
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    pairs = 2 * 4 * 12 * 16
    assert forward.get_total_flops() == 2 * pairs * (8 + 24)
    assert backward.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 24)


@pytest.mark.parametrize("where", ["real", "fake", "meta"])
def test_flops_of_packed_sequences_are_those_of_each(where):
    q, k, v = draw(20, 4, 8), draw(30, 2, 8), draw(30, 2, 24)
    ends = [torch.tensor(cu, dtype=torch.int32) for cu in ((0, 5, 5, 17), (0, 20, 21, 24))]
    fake = FakeTensorMode()
    move = {"real": lambda t: t, "fake": fake.from_tensor, "meta": lambda t: t.to("meta")}[where]
    q, k, v, *ends = (move(t) for t in (q, k, v, *ends))
    x = [t.requires_grad_() for t in (q, k, v)]
    with fake if where == "fake" else nullcontext(), FlopCounterMode(display=False) as forward:
        o = tw.attention(*x, layout=tw.Varlen(*ends, 12, 20))
    with fake if where == "fake" else nullcontext(), FlopCounterMode(display=False) as backward:
        o.sum().backward()
    pairs = 4 * (5 * 20 + 0 * 1 + 12 * 3 if where == "real" else 3 * 12 * 20)
    assert forward.get_total_flops() == 2 * pairs * (8 + 24)
    assert backward.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 24)


# ---- gradients


def test_a_gradient_through_one_output_only():
    x = [t.requires_grad_() for t in qkv(dtype=torch.float64)]
    o, lse = tw.attention(*x, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    through_o = torch.autograd.grad(o, x, do, retain_graph=True)
    through_lse = torch.autograd.grad(lse, x[:2], dlse, retain_graph=True)
    both = torch.autograd.grad((o, lse), x, (do, dlse))
    torch.testing.assert_close(through_o[0] + through_lse[0], both[0])
    torch.testing.assert_close(through_o[1] + through_lse[1], both[1])
    torch.testing.assert_close(through_o[2], both[2])


@pytest.mark.parametrize("options", [{}, {"mask": tw.Causal() & tw.Window(2, 0)}, {"dropout": 0.3, "seed": 5}], ids=str)
def test_gradcheck_of_the_whole(options):
    bias, sink = draw(5, dtype=torch.float64).requires_grad_(), draw(2, dtype=torch.float64).requires_grad_()
    x = [t.requires_grad_() for t in qkv(B=1, M=4, N=5, H=2, H_k=1, D=3, D_v=2, dtype=torch.float64)]

    def call(q, k, v, bias, sink):
        score = [tw.SoftCap(2.0), tw.Bias(bias)]
        return tw.attention(q, k, v, score=score, sink=sink, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, (*x, bias, sink))


def test_only_what_wants_a_gradient_gets_one():
    q, k, v = qkv()
    q.requires_grad_()
    bias, sink = draw(12, 16), draw(4).requires_grad_()
    tw.attention(q, k, v, score=tw.Bias(bias), sink=sink).sum().backward()
    assert q.grad is not None
    assert sink.grad is not None
    assert k.grad is v.grad is bias.grad is None


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        o = tw.attention(*(t.requires_grad_() for t in qkv()))
    assert o.grad_fn is None


@pytest.fixture
def keeping(monkeypatch):
    """The CPU back end, which now keeps two tensors, and what its backward finds of them."""
    cpu, found = load("cpu"), []
    forward, backward = cpu.forward, cpu.backward

    def forward_that_keeps(problem, x, seed):
        return forward(problem, x, seed)._replace(extra=(x.k + 1.0, torch.arange(3)))

    def backward_that_looks(problem, x, saved, do, dlse):
        found.append((saved.extra, x.k))
        return backward(problem, x, saved, do, dlse)

    monkeypatch.setattr(cpu, "forward", forward_that_keeps)
    monkeypatch.setattr(cpu, "backward", backward_that_looks)
    calls.forget()
    yield found
    calls.forget()


@pytest.mark.parametrize("variant", ["full", "dropout", "alibi", "sink", "packed"])
def test_what_a_forward_keeps_reaches_its_backward(keeping, variant):
    if variant == "packed":
        x = (draw(2, 12, 3, 4, 8).requires_grad_(),)
        o, wanted = tw.attention_qkvpacked(*x), x
    else:
        options = VARIANTS[variant]()
        x = [t.requires_grad_() for t in qkv()]
        o, wanted = tw.attention(*x, **options), [*x, *learned(options)]
    first, again = (torch.autograd.grad(o.square().sum(), wanted, retain_graph=True) for _ in range(2))
    assert len(keeping) == 2
    for kept, k in keeping:
        assert torch.equal(kept[0], k + 1.0)
        assert torch.equal(kept[1], torch.arange(3))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("road", ["operator", "transform", "create_graph"])
def test_other_roads_keep_nothing(keeping, road):
    x = [t.requires_grad_() for t in qkv()]
    if road == "operator":
        op(*operator_arguments(x, {})[:3], [], None, Recipe().encode(), 0, 0)[0].sum().backward()
    elif road == "transform":
        torch.func.grad(lambda q: tw.attention(q, *x[1:]).sum())(x[0])
    else:
        torch.autograd.grad(tw.attention(*x).sum(), x, create_graph=True)
    assert [kept for kept, _ in keeping] == [()]


def test_gradients_come_in_each_tensors_own_type():
    x = [t.requires_grad_() for t in qkv(dtype=torch.bfloat16)]
    bias, sink = draw(12, 16, dtype=torch.float64).requires_grad_(), draw(4).requires_grad_()
    tw.attention(*x, score=tw.Bias(bias), sink=sink).float().sum().backward()
    assert [t.grad.dtype for t in x] == [torch.bfloat16] * 3
    assert (bias.grad.dtype, sink.grad.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("road", ["eager", "operator"])
def test_double_backward_is_refused_by_name(road):
    x = [t.requires_grad_() for t in qkv()]
    o = tw.attention(*x) if road == "eager" else op(*operator_arguments(x, {}))[0]
    grads = torch.autograd.grad(o.sum(), x, create_graph=True)
    assert all(g.requires_grad for g in grads)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(grads[0].sum(), x)


def explicit(q, k, v):
    o, lse = tw.attention(q, k, v, mask=tw.Causal(), return_lse=True)
    return tw.attention_backward(torch.ones_like(o), q, k, v, o.detach(), lse.detach(), mask=tw.Causal())


def test_an_explicit_backward_of_leaves_compiles_and_is_not_differentiated_again():
    x = [t.requires_grad_() for t in qkv()]
    grads = torch.compile(explicit, backend="aot_eager", fullgraph=True)(*x)
    assert all(map(torch.equal, grads, explicit(*x)))
    with pytest.raises(RuntimeError, match="no double backward"):
        grads[0].sum().backward()


def test_vmap_maps_an_explicit_backward_and_checks_what_tensors_hold():
    x = [torch.stack([-t, t]) for t in qkv()]
    for mine, theirs in zip(torch.vmap(explicit)(*x), explicit(*(t[1] for t in x)), strict=True):
        assert torch.equal(mine[1], theirs)
    ends, T = torch.tensor([0, 20], dtype=torch.int32), [t[:, 0] for t in x]
    given = {"layout": tw.Varlen(ends, ends, 20, 20)}
    o, lse = torch.zeros(2, 12, 4, 8), torch.zeros(2, 4, 12)
    with pytest.raises(ValueError, match="cu_q must start at 0"):
        torch.vmap(lambda *x: tw.attention_backward(x[3], *x, **given))(*T, o, lse)


def test_create_graph_gives_the_same_gradients():
    x = [t.requires_grad_() for t in qkv()]
    plain = torch.autograd.grad(tw.attention(*x).sum(), x)
    recorded = torch.autograd.grad(tw.attention(*x).sum(), x, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_is_refused_by_name(which):
    x = list(qkv())

    def of_one(t):
        return tw.attention(*x[:which], t, *x[which + 1 :])

    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(of_one, (x[which],), (torch.ones_like(x[which]),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        of_one(forward_ad.make_dual(x[which], torch.ones_like(x[which])))


def test_a_hessian_is_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.hessian(lambda q: tw.attention(q, k, v).sum())(q)


def test_autograds_older_vmap_is_refused_by_name():
    x = [t.requires_grad_() for t in qkv()]
    o = tw.attention(*x, mask=tw.Window(6, 0))
    with pytest.raises(RuntimeError, match=r"older vmap .*torch\.func"):
        torch.autograd.grad(o, x, torch.ones(2, *o.shape), is_grads_batched=True)


def test_forward_mode_of_what_does_not_reach_attention_is_fine():
    with forward_ad.dual_level():
        assert tw.attention(*qkv()).shape == (2, 12, 4, 8)


# ---- checkpointing


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpointing_repeats_the_dropout(dropout):
    x = [t.requires_grad_() for t in qkv()]

    def call(*x):
        return tw.attention(*x, dropout=dropout).sin()

    results = []
    for run in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(5)
        o = run(*x)
        results.append((o, *torch.autograd.grad(o.sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_selective_checkpointing_can_keep_attention():
    x = [t.requires_grad_() for t in qkv()]
    calls = {"forward": 0, "again": 0}

    def policy(context, function, *args, **kwargs):
        if function is op.default:
            calls["again" if context.is_recompute else "forward"] += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def call(*x):
        return tw.attention(*(t * 2.0 for t in x), mask=tw.Causal()).sin()

    o = checkpoint(call, *x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    grads = torch.autograd.grad(o.sum(), x)
    assert calls["forward"] == 1
    for a, b in zip(grads, torch.autograd.grad(call(*x).sum(), x), strict=True):
        torch.testing.assert_close(a, b)


# ---- autocast


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_is_a_cast_before_the_call(variant):
    if variant == "precision":
        pytest.skip("precision is for fp32, which autocast leaves none of")
    options = VARIANTS[variant]()
    x = [t.requires_grad_() for t in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        o = tw.attention(*x, **options)
        grads = torch.autograd.grad(o, x, torch.ones_like(o))
    by_hand = tw.attention(*(t.bfloat16() for t in x), **options)
    expected = torch.autograd.grad(by_hand, x, torch.ones_like(o))
    assert torch.equal(o, by_hand)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_autocast_casts_fp32_operands_only():
    x = [t.requires_grad_() for t in qkv()]
    bias, sink = draw(12, 16).requires_grad_(), draw(4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = tw.attention(*x, score=tw.Bias(bias), sink=sink, return_lse=True)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    by_hand = tw.attention(*(t.bfloat16() for t in x), score=tw.Bias(bias), sink=sink)
    assert torch.equal(o, by_hand)
    o.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (*x, bias, sink))


@pytest.mark.parametrize(
    "kinds", [("bfloat16",) * 3, ("bfloat16", "float32", "float16"), ("float32", "float16", "float16")], ids="-".join
)
def test_autocast_casts_what_torch_casts(kinds):
    q, k, v = (t.to(getattr(torch, kind)).requires_grad_() for t, kind in zip(qkv(H_k=4), kinds, strict=True))
    stacked = torch.stack((q, q, q), 2)
    with torch.autocast("cpu", torch.float16):
        o = tw.attention(q, k, v)
        torchs = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        packed = tw.attention_qkvpacked(stacked)
    assert o.dtype == torchs.dtype == packed.dtype == torch.float16
    assert torch.equal(o, tw.attention(q.half(), k.half(), v.half()))
    grads = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert [g.dtype for g in grads] == [t.dtype for t in (q, k, v)]


def test_autocast_casts_a_narrow_sink_with_them():
    x, sink = qkv(dtype=torch.bfloat16), draw(4).bfloat16()
    with torch.autocast("cpu", torch.float16):
        o = tw.attention(*x, sink=sink)
    assert torch.equal(o, tw.attention(*(t.half() for t in x), sink=sink.half()))


def test_autocast_leaves_fp64_beside_other_types_to_the_caller():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="one type"):
        tw.attention(q.double(), k, v)


def test_autocast_leaves_fp64():
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(*qkv(dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("call", [tw.attention, lambda q, k, v, **options: tw.attention_qkvpacked(
    torch.stack([q, k, v], 2), **options)], ids=["apart", "as qkv"])  # fmt: skip
def test_a_precision_of_fp32_under_autocast_is_refused_by_both_names(call):
    x = qkv(N=12, H_k=4)
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"precision must be .* 'ieee' .* autocast is on; "):
        call(*x, precision="ieee")
    with pytest.raises(ValueError, match=r"'ieee' with torch.bfloat16; leave it out, or convert q, k and v to fp32"):
        call(*(t.bfloat16() for t in x), precision="ieee")


def test_autocast_when_compiled():
    compiled = torch.compile(tw.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(*qkv()).dtype == torch.bfloat16


# ---- vmap


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 1, 1), (0, None, None), (None, 2, 2), (-1, 0, 0), (0, 0, None)])
def test_vmap_maps_the_batch(in_dims):
    x = qkv()

    def stack(t, dim):
        return t if dim is None else torch.stack([t * scale for scale in (1.0, 0.5, -1.0)], dim)

    stacked = [stack(t, dim).requires_grad_() for t, dim in zip(x, in_dims, strict=True)]

    def pick(index):
        return [t if dim is None else t.select(dim, index) for t, dim in zip(stacked, in_dims, strict=True)]

    mapped = torch.vmap(lambda *x: tw.attention(*x, mask=tw.Causal(), return_lse=True), in_dims)(*stacked)
    looped = [
        torch.stack(t)
        for t in zip(*(tw.attention(*pick(n), mask=tw.Causal(), return_lse=True) for n in range(3)), strict=True)
    ]
    for a, b in zip(mapped, looped, strict=True):
        torch.testing.assert_close(a, b)
    cotangents = [torch.randn_like(t) for t in looped]
    grads = [torch.autograd.grad(out, stacked, cotangents) for out in (mapped, looped)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_maps_what_masks_and_scores_carry():
    q, k, v = (torch.stack([t, -t, t * 0.5]) for t in qkv())
    lengths, bias, sink = torch.randint(1, 17, (3, 2)), draw(3, 12, 16).requires_grad_(), draw(3, 4).requires_grad_()

    def call(q, k, v, lengths, bias, sink):
        return tw.attention(q, k, v, mask=tw.Padding(lengths), score=tw.Bias(bias), sink=sink)

    x = (q.requires_grad_(), k, v, lengths, bias, sink)
    mapped = torch.vmap(call)(*x)
    looped = torch.stack([call(*(t[n] for t in x)) for n in range(3)])
    torch.testing.assert_close(mapped, looped)
    leaves = (x[0], bias, sink)
    do = torch.randn_like(looped)
    for a, b in zip(torch.autograd.grad(mapped, leaves, do), torch.autograd.grad(looped, leaves, do), strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_of_one():
    x = [torch.stack([t]) for t in qkv()]
    torch.testing.assert_close(torch.vmap(tw.attention)(*x)[0], tw.attention(*(t[0] for t in x)))


VALUES = {
    "prefix": lambda: {"mask": tw.Prefix(torch.tensor([4, 9]))},
    "padding": lambda: {"mask": tw.Padding(torch.tensor([4, 12]))},
    "padding bool": lambda: {"mask": tw.Padding(torch.rand(2, 12) < 0.6)},
    "documents": lambda: {"mask": tw.Documents(torch.randint(2, (2, 12)), torch.randint(2, (2, 12)))},
    "dense": lambda: {"mask": tw.Dense(torch.rand(4, 12, 12) < 0.6)},
    "alibi": lambda: {"score": tw.Alibi(torch.rand(4))},
    "a bias that does not learn": lambda: {"score": tw.Bias(draw(4, 12, 12))},
    "sink": lambda: {"sink": draw(4)},
    "seed": lambda: {"dropout": 0.3, "seed": torch.tensor(5)},
    "packed": lambda: {"layout": packed()[3]},
}


@pytest.mark.parametrize("road", ["eager", "transform", "operator", "checkpoint"])
@pytest.mark.parametrize("name", VALUES)
def test_what_was_made_in_inference_mode_can_be_trained_with(name, road):
    x = packed()[0] if name == "packed" else draw(2, 12, 4, 8)
    made = []
    for mode in (torch.inference_mode, nullcontext):
        torch.manual_seed(1)
        with mode():
            made.append(VALUES[name]())

    def loss(q, options=made[0]):
        return tw.attention(q, q, q, **options).square().sum()

    def gradient(run):
        q = x.clone().requires_grad_()
        return torch.autograd.grad(run(q), q)[0]

    expected = gradient(partial(loss, options=made[1]))
    with FlopCounterMode(display=False) if road == "operator" else nullcontext():  # a mode sees operators
        if road == "transform":
            found = torch.func.grad(loss)(x)
        elif road == "checkpoint":
            found = gradient(lambda q: checkpoint(loss, q, use_reentrant=False))
        else:
            found = gradient(loss)
    torch.testing.assert_close(found, expected)


def test_per_sample_gradients():
    x = [torch.stack([t, -t, t * 0.5]) for t in qkv()]

    def loss(q, k, v):
        return tw.attention(q, k, v, mask=tw.Causal()).sin().sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*x)
    for n in range(3):
        leaves = [t[n].clone().requires_grad_() for t in x]
        for a, b in zip(torch.autograd.grad(loss(*leaves), leaves), per_sample, strict=True):
            torch.testing.assert_close(b[n], a)


def test_func_grad_and_vjp():
    q, k, v = qkv()
    grads = torch.func.grad(lambda *x: tw.attention(*x).sin().sum(), argnums=(0, 1, 2))(q, k, v)
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(tw.attention(*x).sin().sum(), x)
    o, pull = torch.func.vjp(tw.attention, q, k, v)
    for a, b, c in zip(grads, expected, pull(o.cos()), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)


def of_attention(q):
    return tw.attention(q, q, q, mask=tw.Causal()).square().sum()


TRANSFORMS = {
    "grad": torch.func.grad(of_attention),
    "grad of a part": lambda q: torch.func.grad(of_attention)(2 * q) * 3 + q,
    "grad_and_value": lambda q: torch.stack([t.sum() for t in torch.func.grad_and_value(of_attention)(q)]),
    "vjp": lambda q: torch.func.vjp(of_attention, q)[1](torch.ones(()))[0],
    "jacrev": torch.func.jacrev(lambda q: tw.attention(q, q, q).sum((0, 1, 2))),
    "vmap of grad": lambda q: torch.vmap(torch.func.grad(of_attention))(torch.stack([q, -q])),
    "grad of vmap": torch.func.grad(lambda q: torch.vmap(of_attention)(torch.stack([q, -q])).sum()),
    "vmap": lambda q: torch.vmap(of_attention)(torch.stack([q, -q])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compile_of_transforms(transform):
    q, run = draw(1, 12, 2, 8), TRANSFORMS[transform]
    whole = transform == "vmap"  # Dynamo cannot differentiate an operator, so the others break the graph
    compiled = torch.compile(run, backend="aot_eager", fullgraph=whole)
    torch.testing.assert_close(compiled(q), run(q))
    torch.testing.assert_close(compiled(-q), run(-q))


def test_compile_of_a_gradient_as_one_graph_is_refused_by_name():
    compiled = torch.compile(TRANSFORMS["grad"], backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func's gradients of attention are computed outside of graphs"):
        compiled(draw(1, 12, 2, 8))


def test_compile_of_a_mapped_training_is_one_graph():
    x, run = draw(2, 1, 12, 2, 8), torch.vmap(of_attention)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, expected = (x.clone().requires_grad_() for _ in range(2))
    compiled(found).sum().backward()
    run(expected).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_dispatch_modes_see_operators_through_transforms(transform):
    q, run = draw(1, 12, 2, 8), TRANSFORMS[transform]
    expected = run(q)
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(run(q), expected)
    counted = counter.get_flop_counts()["Global"]
    graph = make_fx(run)(q)
    torch.testing.assert_close(graph(q), expected)
    seen = {node.target for node in graph.graph.nodes}
    for one in (op, op_backward) if transform != "vmap" else (op,):
        assert counted[one] > 0
        assert one.default in seen


# ---- subclasses of Tensor


def test_parameters_and_subclasses_pass():
    q, k, v = qkv()
    expected = tw.attention(q, k, v)
    assert torch.equal(tw.attention(torch.nn.Parameter(q), k, v), expected)

    class Named(torch.Tensor):
        pass

    assert torch.equal(tw.attention(q.as_subclass(Named), k, v).as_subclass(torch.Tensor), expected)


SEEN = []


class Watched(TwoTensor):
    """Two tensors in one, without memory; keeps which operators it saw in SEEN."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs):
        SEEN.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def two(t):
    return Watched(t, t.clone())


WATCHED = {
    "q": lambda q, k, v: tw.attention(two(q), k, v),
    "k": lambda q, k, v: tw.attention(q, two(k), v),
    "v": lambda q, k, v: tw.attention(q, k, two(v)),
    "bias": lambda q, k, v: tw.attention(q, k, v, score=tw.Bias(two(torch.zeros(16)))),
    "lengths": lambda q, k, v: tw.attention(q, k, v, mask=tw.Padding(two(torch.tensor([16, 16])))),
    "sink": lambda q, k, v: tw.attention(q, k, v, sink=two(torch.full((4,), -torch.inf))),
    "cu_k": lambda q, k, v: tw.attention(
        *(t.flatten(0, 1) for t in (q, k, v)),
        layout=tw.Varlen(
            torch.tensor([0, 12, 24], dtype=torch.int32), two(torch.tensor([0, 16, 32], dtype=torch.int32)), 12, 16
        ),
    ).unflatten(0, (2, 12)),
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_subclass_anywhere_gets_the_operator(name):
    x = qkv()
    SEEN.clear()
    o = WATCHED[name](*x)
    assert op.default in SEEN
    torch.testing.assert_close(o.a, tw.attention(*x))


def test_a_subclass_among_rotarys_arguments_gets_the_operator():
    x, cos, sin = draw(2, 5, 2, 8), torch.ones(5, 4), torch.zeros(5, 4)
    for given in ((two(x), cos, sin, 0), (x, cos, two(sin), 0), (x, cos, sin, two(torch.tensor([0, 0])))):
        SEEN.clear()
        o = tw.rotary(*given[:3], offsets=given[3])
        assert torch.ops.tilewise.rotary.default in SEEN
        assert torch.equal(o.a, x)
