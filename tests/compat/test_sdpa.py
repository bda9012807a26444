"""tilewise.compat.sdpa: PyTorch's function gives its own results and gradients, whoever computes them."""

import json
from pathlib import Path

import pytest
import torch
import torch.compiler.config as compiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.call import calls as known
from tilewise.call.check import describe
from tilewise.call.operands import Operands
from tilewise.call.recipe import Recipe
from tilewise.compat import sdpa

ROOT = Path(__file__).parents[2]
attend = functional.scaled_dot_product_attention
ON_CPU = {"devices": ("cpu",), "always": True}


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def qkv(M=9, N=12, H_k=4, D_v=8, dtype=torch.float64):
    return draw(2, 4, M, 8, dtype=dtype), draw(2, H_k, N, 8, dtype=dtype), draw(2, H_k, N, D_v, dtype=dtype)


def of_rank(rank):
    return [t[(0,) * (4 - rank)].detach().requires_grad_() for t in qkv()]


def seen(*shape):
    mask = torch.rand(*shape) < 0.6
    mask[..., 0, :] = False  # a query that sees nothing
    return mask


HIDDEN = torch.zeros(2, 1, 9, 12, dtype=torch.float64).masked_fill_(~seen(2, 1, 9, 12), -torch.inf)
TAKEN = {
    "plain": (qkv, {}),
    "causal": (lambda: qkv(9, 9), {"is_causal": True}),
    "causal, fewer queries": (qkv, {"is_causal": True}),
    "causal, one query": (lambda: qkv(1, 12), {"is_causal": True}),
    "grouped": (lambda: qkv(H_k=2), {"enable_gqa": True}),
    "grouped and causal": (lambda: qkv(9, 9, H_k=1), {"enable_gqa": True, "is_causal": True}),
    "one key head": (lambda: qkv(H_k=1), {}),
    "one head of k, all of v": (lambda: (*qkv(H_k=1)[:2], qkv()[2]), {}),
    "one query head": (lambda: (draw(2, 1, 9, 8), *qkv()[1:]), {}),
    "one batch of q": (lambda: (draw(1, 4, 9, 8), *qkv()[1:]), {}),
    "one batch of keys": (lambda: (qkv()[0], *(draw(1, 4, 12, 8) for _ in range(2))), {}),
    "scale": (qkv, {"scale": 0.3}),
    "another head size of v": (lambda: qkv(D_v=24), {}),
    "rank 3": (lambda: of_rank(3), {}),
    "rank 3, mask per batch": (lambda: of_rank(3), {"attn_mask": seen(4, 9, 12)}),
    "rank 3, one mask": (lambda: of_rank(3), {"attn_mask": seen(9, 12)}),
    "rank 2": (lambda: of_rank(2), {"is_causal": True}),
    "bool": (qkv, {"attn_mask": seen(9, 12)}),
    "bool per head": (qkv, {"attn_mask": seen(4, 9, 12)}),
    "padding": (qkv, {"attn_mask": torch.arange(12) < torch.tensor([7, 12])[:, None, None, None]}),
    "float": (qkv, {"attn_mask": draw(4, 9, 12)}),
    "float, broadcast": (qkv, {"attn_mask": draw(2, 1, 1, 12)}),
    "float, in fp32": (qkv, {"attn_mask": draw(9, 12, dtype=torch.float32)}),
    "float, hiding": (qkv, {"attn_mask": HIDDEN}),
    "no dropout": (qkv, {"dropout_p": 0.0}),
}
HANDED_BACK = {
    "causal, more queries": (lambda: qkv(12, 9), {"is_causal": True}, "more queries"),
    "causal and a mask": (qkv, {"is_causal": True, "attn_mask": seen(9, 12)}, "with a mask"),
    "rank 5": (lambda: [t.unsqueeze(0) for t in qkv()], {}, "more than 4"),
    "several ranks": (lambda: (draw(4, 9, 8), *qkv()[1:]), {}, "several ranks"),
    "grouped apart": (lambda: (*qkv(H_k=2)[:2], draw(2, 1, 12, 8)), {"enable_gqa": True}, "heads that do not fit"),
    "a negative scale": (qkv, {"scale": -0.3}, "scale must be"),
    "a large head": (lambda: [draw(1, 2, 5, 513) for _ in range(3)], {}, "head size"),
    "dropout of everything": (qkv, {"dropout_p": 1.0}, "dropout must be"),
}


def close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


def results(x, options):
    """Return the output and the gradients of everything that requires one."""
    torch.manual_seed(1)
    out = attend(*x, **options)
    wanted = [t for t in (*x, options.get("attn_mask")) if t is not None and t.requires_grad]
    return out, *torch.autograd.grad(out, wanted, torch.randn(out.shape, dtype=out.dtype))


@pytest.mark.parametrize("name", TAKEN)
def test_a_call_taken_is_as_pytorchs(name):
    make, options = TAKEN[name]
    x = make()
    expected = results(x, options)
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        found = results(x, options)
    assert str(calls) == "ran 1 call (cpu: 1); 0 calls fell back to PyTorch"
    assert found[0].shape == expected[0].shape
    close(found, expected)


LAYOUTS = {
    "(B, H, M, D)": lambda t: t,
    "(B, M, H, D)": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "(M, B, H, D)": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "(H, B, M, D)": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "(B, H, D, M)": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "packed": lambda t: torch.stack([t.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2),
}


def steps(t):
    """Return the strides that matter: those of dimensions with more than one entry."""
    return [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TAKEN)
def test_views_of_a_result_on_a_cpu_are_pytorchs(name, layout):
    make, options = TAKEN[name]
    q, *kv = make()
    q = LAYOUTS[layout](q.detach()) if q.ndim == 4 else q
    expected = attend(q, *kv, **options)
    with sdpa.use(**ON_CPU):
        found = attend(q, *kv, **options)
        again = attend(q, *kv, **options)
    assert steps(found) == steps(again) == steps(expected)


def test_views_of_a_result_with_dropout_are_pytorchs():
    x = [LAYOUTS["(B, M, H, D)"](t.detach()) for t in qkv()]
    expected = attend(*x, dropout_p=0.5)
    with sdpa.use(**ON_CPU):
        assert attend(*x, dropout_p=0.5).stride() == expected.stride()


def test_views_of_a_compiled_result_are_pytorchs():
    torch._dynamo.reset()
    x = [t.float().detach().requires_grad_() for t in qkv()]
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        out = torch.compile(lambda q, k, v: attend(q, k, v).view(2, -1), backend="aot_eager", fullgraph=True)(*x)
        out.sum().backward()
    torch.testing.assert_close(out, attend(*x).view(2, -1))
    assert calls.ran == {"cpu": 1}


@pytest.mark.parametrize("name", HANDED_BACK)
def test_a_call_fell_back_is_pytorchs(name):
    make, options, reason = HANDED_BACK[name]
    x = make()
    expected = results(x, options)
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        found = results(x, options)
    ((counted, number),) = calls.fell_back.items()
    assert reason in counted
    assert (number, calls.ran) == (1, {})
    assert found[0].grad_fn.name() == expected[0].grad_fn.name()
    close(found, expected)


WRONG = {
    "types": lambda: attend(*qkv()[:2], qkv(dtype=torch.float32)[2]),
    "heads": lambda: attend(qkv()[0], *qkv(H_k=3)[1:]),
    "a mask too long": lambda: attend(*qkv(), attn_mask=seen(9, 13)),
    "a mask of ints": lambda: attend(*qkv(), attn_mask=torch.ones(9, 12, dtype=torch.int32)),
    "rank 1": lambda: attend(*[torch.randn(8)] * 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_by_pytorch(name):
    with pytest.raises((RuntimeError, IndexError)) as expected:
        WRONG[name]()
    with sdpa.use(**ON_CPU), pytest.raises(type(expected.value)) as found:
        WRONG[name]()
    assert str(found.value) == str(expected.value)
    assert "tilewise" not in str(found.value)


def test_a_kind_of_call_is_checked_once(monkeypatch):
    made, check = [], sdpa.check_arguments
    monkeypatch.setattr(sdpa, "check_arguments", lambda *given: made.append(1) or check(*given))
    viewed = "rank 3, mask per batch"
    """Its mask gets a dimension more in each call."""
    cases = {name: case for name, case in TAKEN.items() if "dropout_p" not in case[1] and name != viewed}
    known.forget()
    with sdpa.use(**ON_CPU):
        for count in (len(cases), len(cases)):
            for make, options in cases.values():
                x = make()
                with sdpa_kernel(SDPBackend.MATH):  # PyTorch's own, even if the call's kind is known
                    expected = attend(*x, **options)
                with tw.count_calls() as calls:
                    o = attend(*x, **options)
                assert calls.ran.total() == 1
                torch.testing.assert_close(o, expected)
                found, wanted = (torch.autograd.grad(each.sum(), x) for each in (o, expected))
                torch.testing.assert_close(found, wanted)
            assert len(made) == count
    with sdpa.use(devices=("cpu",)), tw.count_calls() as calls:
        attend(*qkv())
    assert calls.fell_back.total() == 1, "other settings know nothing"


def test_dropout_is_tilewises_and_follows_torchs_generator():
    x = [t.detach() for t in qkv(64, 64, dtype=torch.float32)]
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        outs = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            outs.append(attend(*x, dropout_p=0.4))
        many = torch.stack([attend(*x, dropout_p=0.4) for _ in range(200)])
    assert calls.ran["cpu"] == 203
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    torch.testing.assert_close(many.mean(0), attend(*x), atol=0.1, rtol=0.1)


def test_autocast_and_inference_mode():
    x = qkv(dtype=torch.float32)
    expected = attend(*(t.bfloat16() for t in x))
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        with torch.autocast("cpu", torch.bfloat16):
            found = attend(*x)
        with torch.inference_mode():
            plain = attend(*x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(plain, attend(*x).detach())
    assert calls.ran == {"cpu": 2}


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": seen(9, 12)}, {"attn_mask": torch.randn(9, 12)}, {"scale": 0.3}]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_holds_tilewises_operator(options, dynamic):
    torch._dynamo.reset()
    x = qkv(dtype=torch.float32)
    out = attend(*x, **options).sin()
    expected = out, *torch.autograd.grad(out.sum(), x)
    compiled = torch.compile(
        lambda *x: attend(*x, **options).sin(), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        for _ in range(2):
            out = compiled(*x)
    found = out, *torch.autograd.grad(out.sum(), x)
    assert calls.ran == {"cpu": 2}
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_compiled_code_hands_back_what_it_traces():
    torch._dynamo.reset()
    x = qkv(12, 9, dtype=torch.float32)
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        found = torch.compile(lambda *x: attend(*x, is_causal=True), backend="aot_eager", fullgraph=True)(*x)
    torch.testing.assert_close(found, attend(*x, is_causal=True))
    assert not calls.ran
    assert calls.fell_back


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        (SDPBackend.MATH, False),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], False),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.OVERRIDEABLE], True),
    ],
)
def test_sdpa_kernel_chooses(named, taken):
    x = qkv()
    with tw.count_calls() as calls, sdpa.use(**ON_CPU), sdpa_kernel(named):
        attend(*x)
    assert bool(calls.ran) is taken
    assert list(calls.fell_back) == ([] if taken else ["sdpa_kernel(...) names other kernels"])


def with_a_tangent(q, k, v):
    """In fp64, PyTorch's kernels for short sequences have no such derivative, but its plain path has."""
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.OVERRIDEABLE]):
        return torch.func.jvp(lambda q: attend(q, k, v), (q,), (torch.ones_like(q),))[1]


def by_dual_numbers(q, k, v):
    forward = torch.autograd.forward_ad
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.OVERRIDEABLE]), forward.dual_level():
        dual = forward.make_dual(q.detach(), torch.ones_like(q))
        return forward.unpack_dual(attend(dual, k.detach(), v.detach())).tangent


def of_each(q, k, v):
    return torch.func.vmap(attend)(q[None], k[None], v[None])[0]


TRANSFORMS = {
    "grad": lambda q, k, v: torch.func.grad(lambda q: attend(q, k, v).sum())(q),
    "jvp": with_a_tangent,
    "dual numbers": by_dual_numbers,
    "vmap": of_each,
    "vmap of grad": lambda q, k, v: torch.func.vmap(torch.func.grad(lambda q: attend(q, k[0], v[0]).sum()))(q),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_get_pytorchs_own(name):
    x = [t.detach() for t in qkv()]
    expected = TRANSFORMS[name](*x)
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        found = TRANSFORMS[name](*x)
    assert torch.equal(found, expected)
    assert not calls.ran


class Labelled(torch.Tensor):
    """A subclass with no storage rules of its own."""


def nested(layout):
    parts = [torch.randn(n, 4, 8) for n in (3, 5)]
    if layout is torch.strided:
        return torch.nested.nested_tensor([part.transpose(0, 1).contiguous() for part in parts])
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nested(torch.strided),
        lambda: nested(torch.jagged),
        lambda: torch.randn(2, 4, 9, 8).as_subclass(Labelled),
    ],
    ids=["nested", "jagged", "subclass"],
)
def test_other_tensors_get_pytorchs_own(make):
    x = make()
    expected = attend(x, x, x)
    with tw.count_calls() as calls, sdpa.use(**ON_CPU):
        found = attend(x, x, x)
    assert type(found) is type(expected)
    for mine, theirs in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not calls.ran


def test_fake_and_meta_tensors():
    with sdpa.use(**ON_CPU):
        assert attend(*[t.detach().to("meta") for t in qkv()]).shape == (2, 4, 9, 8)
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(2, 4, 9, 8)
            out = attend(x, x, x)
    assert out.shape == x.shape
    assert out.stride() == attend(*[torch.empty(2, 4, 9, 8)] * 3).stride()


def test_an_exported_graph_stays_portable():
    class Model(torch.nn.Module):
        def forward(self, q):
            return attend(q, q, q)

    with sdpa.use(**ON_CPU):
        graph = torch.export.export(Model(), (torch.randn(2, 4, 9, 8),)).graph
    assert "aten.scaled_dot_product_attention.default" in [str(node.target) for node in graph.nodes]


def ours():
    with tw.count_calls() as calls:
        attend(*qkv())
    return bool(calls.ran)


def test_install_and_uninstall_leave_nothing_behind():
    key = compiler.cache_key_tag
    sdpa.uninstall()
    try:
        sdpa.install(**ON_CPU)
        sdpa.install(**ON_CPU)
        assert ours()
        assert "tilewise" in compiler.cache_key_tag
        with sdpa.use(devices=("cuda",)):
            assert not ours()
        assert ours()
        with pytest.raises(RuntimeError, match="already"):
            sdpa.install()
    finally:
        sdpa.uninstall()
    assert not ours()
    assert compiler.cache_key_tag == key
    assert attend(*qkv()).grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"


def test_the_context_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), sdpa.use(**ON_CPU):
        raise ZeroDivisionError
    assert not ours()


def test_on_a_cpu_nothing_is_taken_unless_always():
    with tw.count_calls() as calls, sdpa.use(devices=("cpu",)):
        attend(*qkv())
    assert calls.fell_back == {"it is on a CPU, and always=False": 1}


def test_calls_on_other_devices_are_left_alone_and_counted_if_asked(monkeypatch):
    x = qkv()
    expected = results(x, {})
    for counted, fell_back in ((set(), {}), ({"cpu"}, {"it is on a CPU": 2})):
        monkeypatch.setattr(sdpa, "COUNTED", counted)
        with tw.count_calls() as calls, sdpa.use():
            found = results(x, {})
            with torch.inference_mode():
                attend(*x, dropout_p=0.5, scale=0.1)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert (calls.ran, calls.fell_back) == ({}, fell_back)
        assert attend(*x).grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"


def times():
    """Yield head size, causality, length and the times of every implementation, forward and backward, of the H200."""
    suites = json.loads((ROOT / "benchmarks/results/nvidia-h200/bench.json").read_text())["suites"]
    for suite in (suites["paper"], suites["classic"]):
        same, found = suite["rows"]["same"], {}
        for values in suite["rows"]["table"]:
            row = {**same, **dict(zip(suite["rows"]["columns"], values, strict=True))}
            name = row["implementation"]
            if row["status"] == "ok" and (name == "tilewise" or name.startswith("sdpa ")):
                key = row["case.head_size"], row["case.causal"], row["case.length"]
                found.setdefault(key, {}).setdefault(name, {})[row["pass_"]] = row["milliseconds"]
        yield from ((*key, by_name) for key, by_name in found.items())


def test_the_measured_rows_are_those_of_the_results_and_of_the_page():
    rows, page = sdpa.MEASURED["sm_90"], (ROOT / "docs/use/with-sdpa.md").read_text()
    for (D, causal), (with_gradients, without) in rows.items():
        said = f"{'causal' if causal else 'none'} | {D} | {with_gradients} x {with_gradients} | {without} x {without} |"
        assert said in page
    slower = []
    for D, causal, length, by_name in times():
        least = dict(zip(("forward+backward", "forward"), rows[D, causal], strict=True))
        for pass_, shortest in least.items():
            total = {
                name: by[pass_] if pass_ in by else by["forward"] + by["backward"]
                for name, by in by_name.items()
                if pass_ in by or {"forward", "backward"} <= by.keys()
            }
            if length >= shortest and total and total["tilewise"] > min(total.values()):
                slower.append((D, causal, length, pass_))
    assert slower == []


def on(target, M, N, D=64, dtype=torch.bfloat16, causal=False, mask=()):
    x = [torch.empty(1, length, 1, D, dtype=dtype, device="meta") for length in (M, N, N)]
    problem = tw.explain.__globals__["describe_fake"](
        Operands(*x, ()), Recipe((("Causal",),) if causal else mask), (0, 0), target
    )
    return problem


@pytest.mark.parametrize(
    ("target", "M", "N", "more", "gradients", "against"),
    [
        ("sm_90", 256, 256, {}, True, None),
        ("sm_90", 256, 256, {}, False, "short"),
        ("sm_90", 512, 512, {}, False, None),
        ("sm_90", 512, 512, {"causal": True}, False, "short"),
        ("sm_90", 128, 128, {"causal": True}, True, None),
        ("sm_90", 511, 512, {"D": 128}, True, "short"),
        ("sm_90", 1, 1 << 20, {}, False, "few queries"),
        ("sm_90", 255, 256, {"dtype": torch.float32}, True, "short"),
        ("sm_90", 256, 256, {"dtype": torch.float32}, True, None),
        ("sm_80", 256, 256, {}, False, None),
        ("sm_80", 255, 256, {}, True, "short"),
    ],
)
def test_measured_rows_decide(target, M, N, more, gradients, against):
    x = torch.zeros(1, requires_grad=gradients)
    with sdpa.use(devices=("cuda",)):
        reason = sdpa._against_running(Operands(x, x, x, ()), on(target, M, N, **more), "hopper")
    assert reason is None if against is None else against in reason


def test_back_ends_are_asked_for_the_chip():
    q = torch.zeros(1, 8, 2, 8)
    assert sdpa._described(Operands(q, q, q, ()), Recipe())[1] == "cpu"
    problem = describe(Operands(q, q, q, ()), Recipe(), (0, 0))
    assert sdpa._described(Operands(q, q, q, ()), Recipe())[0] == problem
    with FakeTensorMode():
        x = torch.empty(1, 8, 2, 8)
        assert sdpa._described(Operands(x, x, x, ()), Recipe())[1] == "cpu"
