"""Launches that are kept: the next call of a kind gives them its own addresses, and little else runs in Python."""

import inspect
import itertools
import sys
from collections import Counter
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise.append import api as append
from tilewise.append import op as append_op
from tilewise.attention import api, eager, gradients, op
from tilewise.call import calls as known
from tilewise.call import check

pytest.importorskip("triton")
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver as nvidia

from tilewise.call.operands import Saved
from tilewise.call.recipe import Recipe
from tilewise.hopper import launch as hopper_launch
from tilewise.hopper.descriptors import Descriptor
from tilewise.hopper.fp32 import launch as fp32_launch
from tilewise.host import launch as host
from tilewise.host import repeat, split
from tilewise.host import replay as host_replay
from tilewise.host.arguments import unplanned
from tilewise.host.replay import Replay
from tilewise.triton import launch as portable_launch
from tilewise.triton.single import launch as single_launch

pytestmark = pytest.mark.skipif(
    getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None) is None, reason="this Triton has another wrapper"
)
BF16 = torch.bfloat16


class Recorder:
    """A launcher that only tells what it was given."""

    def __init__(self, given):
        self.given = given

    def __call__(self, *arguments):
        self.given.append(arguments)


@pytest.fixture
def launched(monkeypatch):
    """Let CPU tensors count as a GPU's, and return the list of what launchers are given."""
    given, count = [], itertools.count()

    def compiled(_, start):
        one = inspect.getclosurevars(start).nonlocals["self"]
        names = list(inspect.signature(one.kernel.fn).parameters)
        monkeypatch.setattr(one.kernel, "arg_names", names, raising=False)  # the interpreter's has none
        signature = {n: "tensordesc" if isinstance(each, Descriptor) else "i32" for n, each in enumerate(one.arguments)}
        run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        run.launch = nvidia.wrap_handle_tensordesc(Recorder(given), signature, None)
        run.launch_cooperative_grid = run.launch_pdl = False
        run.global_scratch_size = run.profile_scratch_size = 0
        return SimpleNamespace(run=run, function=f"function {next(count)}", packed_metadata="metadata")

    def described(descriptor, _):
        sizes = *descriptor.shape, *descriptor.strides
        return [("map", descriptor.base.data_ptr(), *sizes), *sizes]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", described)
    monkeypatch.setattr(host, "compile_once", compiled)
    monkeypatch.setattr(check, "target_of", lambda _: "sm_90")
    for module in (eager, gradients, append_op):
        monkeypatch.setattr(module, "check_contents", lambda *_: None)
    for module in (host, split, host_replay, hopper_launch, fp32_launch, portable_launch, single_launch):
        monkeypatch.setattr(module, "current_stream", lambda _: 7)
    monkeypatch.setattr(append_op, "append_in_torch", append_op.launch_module("append").launch)
    monkeypatch.setattr(hopper_launch, "COUNTERS", {})
    monkeypatch.setattr(hopper_launch, "SPARE", {})
    monkeypatch.setattr(hopper_launch, "ADDRESSES", {})
    monkeypatch.setattr(repeat, "EMPTY", lambda *size: torch.empty_strided(*size[:2], dtype=size[2]))
    monkeypatch.setattr(repeat, "STREAM", lambda _: hopper_launch.current_stream(None))
    monkeypatch.setattr(repeat, "CURRENT", lambda: None)
    monkeypatch.setattr(repeat, "CAPTURING", lambda: False)
    known.forget()
    yield given
    known.forget()


def plain(alibi=False, backend=None):
    q, k, v = (torch.randn(1, n, h, 128, dtype=BF16) for n, h in ((1, 32), (1024, 8), (1024, 8)))
    score = (tw.Alibi(torch.rand(32)),) if alibi else ()
    tensors = q, k, v, *(t for s in score for t in s.tensors)
    return lambda: tw.attention(q, k, v, score=score, backend=backend), tensors


def cached(B=3, backend=None):
    q, k, v = (torch.randn(*shape, 128, dtype=BF16) for shape in ((B, 1, 32), (64, 64, 8), (64, 64, 8)))
    table = torch.randint(0, 64, (B, 8), dtype=torch.int32)
    layout = tw.Cached(torch.full((B,), 100, dtype=torch.int32), table)
    tensors = q, k, v, layout.lengths, table
    return lambda: tw.attention(q, k, v, mask=tw.Causal(), layout=layout, backend=backend), tensors


def pack():
    """Sequences of 1 and of 100 queries: those below FULL run on the portable kernel, after Hopper's own."""
    q, k, v = (torch.randn(*shape, 128, dtype=BF16) for shape in ((101, 32), (64, 64, 8), (64, 64, 8)))
    table, cu_q = torch.randint(0, 64, (2, 8), dtype=torch.int32), torch.tensor([0, 1, 101], dtype=torch.int32)
    layout = tw.Cached(torch.full((2,), 100, dtype=torch.int32), table, cu_q=cu_q)
    tensors = q, k, v, cu_q, layout.lengths, table
    return lambda: tw.attention(q, k, v, mask=tw.Causal(), layout=layout, backend="hopper"), tensors


def appended(B=3):
    q, k, v = (torch.randn(*shape, 128, dtype=BF16) for shape in ((B, 1, 32), (64, 64, 8), (64, 64, 8)))
    k_new, v_new = torch.randn(2, B, 1, 8, 128, dtype=BF16).unbind()
    cos, sin = torch.randn(2, 512, 64).unbind()
    table = torch.zeros(B, 8, dtype=torch.int32)
    layout = tw.Cached(torch.full((B,), 100, dtype=torch.int32), table)
    tensors = q, k, v, k_new, v_new, cos, sin, layout.lengths, table
    return lambda: tw.append_(k, v, k_new, v_new, layout=layout, cos=cos, sin=sin, q=q), tensors


def merged(packed=False):
    rows, of_lse = ((64, 4), (4, 64)) if packed else ((2, 64, 4), (2, 4, 64))
    o, part = torch.randn(2, *rows, 128).unbind()
    lse, of_part = torch.randn(2, *of_lse).unbind()
    return lambda: tw.merge([(part, of_part)], into=(o, lse), backend="triton"), (o, lse, part, of_part)


OPTIONS = {
    "full": dict,
    "causal": lambda: {"mask": tw.Causal()},
    "prefix": lambda: {"mask": tw.Prefix(torch.tensor([5, 200]))},
    "sink": lambda: {"mask": tw.Window(50, 0), "sink": torch.randn(4)},
    "bias": lambda: {"score": tw.Bias(torch.randn(300, 300, dtype=BF16))},
    "dropout": lambda: {"dropout": 0.1, "seed": torch.tensor(3)},
    "deterministic": lambda: {"deterministic": True},
    "packed": lambda: {"layout": tw.Varlen(*[torch.tensor([0, 200, 600], dtype=torch.int32)] * 2, 400, 400)},
}
"""Options of calls, each with its own tensors."""


def operands(name, dtype, **given):
    """Return q, k and v; the options, and their tensors."""
    options = {**OPTIONS[name](), **given}
    rows = (600,) if "layout" in options else (2, 300)
    x = [torch.randn(*rows, heads, 128, dtype=dtype) for heads in (4, 2, 2)]
    extra = [each for each in options.values() if isinstance(each, torch.Tensor)]
    return x, options, [*extra, *(t for each in options.values() for t in getattr(each, "tensors", ()))]


def forward(name, dtype=BF16, **given):
    x, options, extra = operands(name, dtype, **given)
    return lambda: tw.attention(*x, **options), (*x, *extra)


def backward(name, of_do=torch.empty_like, of_lse=False, dtype=BF16, **given):
    """`of_do` makes the gradient of o; with `of_lse`, there is one of lse."""
    x, options, extra = operands(name, dtype, **given)
    *rows, H, _ = x[0].shape
    o, lse = torch.randn(*rows, H, 128, dtype=dtype), torch.randn(*rows[:-1], H, rows[-1])
    do, dlse = of_do(o), torch.randn_like(lse) if of_lse else None
    grads = [do] if dlse is None else [do, dlse]
    return lambda: tw.attention_backward(do, *x, o, lse, dlse=dlse, **options), (*x, o, lse, *grads, *extra)


def flat(value, names):
    """Return arguments with the name of a tensor in place of its address; of others a number, in order."""
    if isinstance(value, (tuple, list)):
        return tuple(flat(each, names) for each in value)
    address = value.data_ptr() if isinstance(value, torch.Tensor) else value
    made = isinstance(address, int) and address > 1 << 40
    return names.setdefault(address, f"made {len(names)}") if made else names.get(address, address)


CALLS = {"plain": plain, "alibi": lambda: plain(alibi=True), "cached": cached, "pack": pack, "append": appended}
CALLS |= {"plain on hopper": partial(plain, backend="hopper"), "cached on hopper": partial(cached, backend="hopper")}
CALLS |= {"merge": merged, "merge packed": lambda: merged(packed=True)}
for way, pass_ in (("", forward), (" backward", backward)):
    CALLS |= {f"hopper {name}{way}": partial(pass_, name) for name in OPTIONS}
    CALLS |= {f"portable {name}{way}": partial(pass_, name, backend="triton") for name in OPTIONS}
    fp32 = [name for name in OPTIONS if name not in ("bias", "dropout")]
    CALLS |= {f"fp32 {name}{way}": partial(pass_, name, dtype=torch.float32, backend="hopper") for name in fp32}
CALLS |= {"hopper lse backward": partial(backward, "causal", of_lse=True)}
LAUNCHES = {
    "plain": 2, "alibi": 2, "cached": 2, "pack": 3, "append": 1, "merge": 1, "merge packed": 1, "hopper": 1,
    "portable": 1, "fp32": 2, "fp32 backward": 4, "fp32 deterministic backward": 5, "hopper backward": 3,
    "hopper bias backward": 4, "hopper deterministic backward": 4, "portable backward": 3, "portable bias backward": 4,
}  # fmt: skip
"""How many there are, by the whole name of a call or its first and last words."""


def given_to_launchers(launched, call, tensors):
    launched.clear()
    with torch.no_grad():
        call()
    names = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}
    return [flat(given, names) for given in launched]


def refuse(*_):
    raise AssertionError("a launch was built again")


@pytest.mark.parametrize("name", CALLS)
def test_the_launchers_get_what_they_would_without_it(launched, monkeypatch, name):
    (first, _), second, third = (CALLS[name]() for _ in range(3))
    with torch.no_grad():
        first()  # it compiles, and launches nothing here
    with monkeypatch.context() as patch:
        patch.setattr(host.Launch, "run", refuse)
        found = given_to_launchers(launched, *second)
    forget(monkeypatch)
    assert found == given_to_launchers(launched, *third)
    words = name.split()
    usual = f"{words[0]} backward" if words[-1] == "backward" else words[0]
    assert len(found) == LAUNCHES.get(name, LAUNCHES[usual])
    assert {n for given in found for n in numbers(given)} >= {"tensor 0", "tensor 1", "tensor 2"}


def forget(monkeypatch):
    """Let every call make its launches anew."""
    monkeypatch.setattr(Replay, "run", lambda *_: False)
    for module in (api, op, append):
        monkeypatch.setattr(module, "find", lambda *_: None)


def numbers(value):
    return [n for each in value for n in numbers(each)] if isinstance(value, tuple) else [value]


def test_a_copy_is_not_kept(launched, monkeypatch):
    q, k = torch.randn(1, 1, 32, 128, dtype=BF16), torch.randn(1, 1024, 8, 256, dtype=BF16)[..., ::2]
    tried, keep = [], Replay.keep
    monkeypatch.setattr(Replay, "keep", lambda *given: tried.append(1) or keep(*given))
    with torch.no_grad():
        for _ in range(4):
            tw.attention(q, k, k)  # k is copied, as its entries lie apart
    assert len(launched) == 3 * 2
    assert len(tried) == 1, "nor does a call try again"


@pytest.mark.parametrize("rows", [1, 300], ids=["plain", "hopper"])
def test_a_tensor_given_twice_is_kept_for_such_calls_alone(launched, monkeypatch, rows):
    q, k, v, other = (torch.randn(1, n, 8, 128, dtype=BF16) for n in (rows, 1024, 1024, 1024))
    names = {t.data_ptr(): name for t, name in ((q, "q"), (k, "k"), (v, "v"), (other, "other"))}
    with torch.no_grad():
        for keys, values in ((k, k), (k, k), (other, other), (k, v), (other, other), (v, k)):
            launched.clear()
            tw.attention(q, keys, values)
            if launched:  # the first call only compiles
                given = [n for n in numbers(flat(launched[0], dict(names))) if n in names.values()]
                places = sorted(set(given), key=given.index)
                assert places[:3] == list(dict.fromkeys(("q", names[keys.data_ptr()], names[values.data_ptr()])))


def test_calls_at_one_address_are_told_apart(launched, monkeypatch):
    """Memory that is freed and given out again may hold another shape, type or order, for other options."""
    memory = torch.randn(3, 1 << 20, dtype=BF16)
    views = {
        "contiguous": lambda t: t[: 1 << 18].view(2, 256, 4, 128),
        "apart": lambda t: t[: 1 << 19].view(2, 256, 8, 128)[:, :, ::2],
        "heads first": lambda t: t[: 1 << 18].view(2, 4, 256, 128).transpose(1, 2),
        "longer": lambda t: t[: 1 << 18].view(1, 512, 4, 128),
        "narrow": lambda t: t[: 1 << 18].view(2, 512, 4, 64),
        "fp16": lambda t: t[: 1 << 18].view(torch.float16).view(2, 256, 4, 128),
    }
    options = {}, {"mask": tw.Causal()}, {"scale": 0.5}, {"score": tw.SoftCap(20.0)}
    calls = [
        partial(tw.attention, *map(view, memory), backend="hopper", **given)
        for view, given in itertools.product(views.values(), options)
    ]
    found = [given_to_launchers(launched, call, memory) for _ in range(2) for call in calls][len(calls) :]
    forget(monkeypatch)
    assert found == [given_to_launchers(launched, call, memory) for call in calls]
    assert len({repr(each) for each in found}) == len(calls)


def test_values_inside_keys_are_told_apart(launched, monkeypatch):
    """Guards see no addresses: a kernel that takes V from K's tiles may not be launched for other values."""
    q, pool, other = (torch.randn(*shape, 576, dtype=BF16) for shape in ((3, 1, 16), (64, 64, 1), (64, 64, 1)))
    layout = tw.Cached(torch.full((3,), 100, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32))
    pairs = [
        (pool, 0, pool),
        (pool, 0, other),
        (other, 0, other),
        (pool, 64, pool),
        (other, 0, pool),
        (pool, 64, other),
    ]
    inside = [keys is values and not start for keys, start, values in pairs]
    calls = [
        partial(tw.attention, q, keys, values[..., start : start + 512], layout=layout, backend="triton")
        for keys, start, values in pairs
    ]
    tensors = q, pool, other, pool[..., 64:], other[..., 64:], layout.lengths, layout.table
    found = [given_to_launchers(launched, call, tensors) for _ in range(3) for call in (*calls, *reversed(calls))]
    forget(monkeypatch)
    wanted = [given_to_launchers(launched, call, tensors) for call in calls]
    assert found[-2 * len(calls) :] == [*wanted, *reversed(wanted)]
    functions = [{n for n in numbers(launches[0]) if str(n).startswith("function")} for launches in wanted]
    assert [one == functions[0] for one in functions] == inside
    for (_, start, values), within, launches in zip(pairs, inside, wanted, strict=True):
        place = 1 + (values is other) + 2 * (start > 0)
        assert numbers(launches[0]).count(f"tensor {place}") == 1, "of K or of V, not both" if within else "V is read"


def test_which_tensor_is_unaligned_is_told_apart():
    """A kernel that reads o in pieces of 16 bytes may not be launched again where lse alone begins at such a place."""
    memory = torch.empty(1024)
    places = [memory[:64], memory[2:66]]
    kinds = [unplanned(Saved(o, lse), do, dlse) for o, lse, do, dlse in itertools.product(places, repeat=4)]
    kinds += [unplanned(Saved(o, lse), do, None) for o, lse, do in itertools.product(places, repeat=3)]
    assert len(set(kinds)) == len(kinds)


def test_a_tensor_that_is_left_out_moves_no_other(launched):
    """One more tensor among a call's, as a seed is, must not shift those that are kept by their places."""
    q, k, v = (torch.randn(2, 300, 4, 128, dtype=BF16) for _ in range(3))
    names = {t.data_ptr(): f"tensor {n}" for n, t in enumerate((q, k, v))}
    found = []
    for seed in (None, None, torch.tensor(3)):
        launched.clear()
        eager.attend((q, k, v), seed, known.Call(Recipe(backend="hopper"), (0, 0)))
        found.append([flat(given, dict(names)) for given in launched])
    assert found[1] == found[2]


@pytest.mark.parametrize("of_lse", [False, True])
def test_gradients_are_told_apart(launched, monkeypatch, of_lse):
    """What the forward's problem does not tell of the gradient of o: strides, alignment, and whether lse has one."""
    spread = {
        "contiguous": torch.empty_like,
        "expanded": lambda o: torch.ones((), dtype=BF16).expand(o.shape),
        "heads first": lambda o: torch.empty(2, 4, 300, 128, dtype=BF16).transpose(1, 2),
        "unaligned": lambda o: torch.empty(o.numel() + 1, dtype=BF16)[1:].view(o.shape),
    }
    calls = [backward("causal", of_do=of_do, of_lse=of_lse) for of_do in spread.values()]
    calls += [backward("causal", of_do=of_do, of_lse=not of_lse) for of_do in spread.values()]
    found = [given_to_launchers(launched, *call) for _ in range(2) for call in calls][len(calls) :]
    forget(monkeypatch)
    assert found == [given_to_launchers(launched, *call) for call in calls]


@pytest.mark.parametrize("of", [forward, backward])
def test_a_call_of_another_stream_has_its_counter(launched, monkeypatch, of):
    call, tensors = of("causal")
    found = {}
    for stream in (7, 8, 7, 8):
        monkeypatch.setattr(hopper_launch, "current_stream", lambda _, stream=stream: stream)
        given_to_launchers(launched, call, tensors)
        found[stream] = list(launched)
    counters = {stream: hopper_launch.counter(tensors[0].device, stream).data_ptr() for stream in found}
    assert counters[7] != counters[8]
    for stream, given in found.items():
        assert {each[3] for each in given} == {stream}
        used = [n for each in given for n in numbers(each)]
        assert counters[stream] in used
        assert counters[15 - stream] not in used


def same_memory(monkeypatch, cycle=1):
    """Let results lie where they lay before, as a GPU's allocator gives freed memory again; in each call as many of one
    shape as `cycle` lie apart."""
    made, counts, strided, empty = {}, Counter(), torch.empty_strided, torch.empty

    def again(place, make):
        counts[place] += 1
        return made.setdefault((place, counts[place] % cycle), make)

    monkeypatch.setattr(
        torch,
        "empty_strided",
        lambda shape, strides, *, dtype, **options: again(
            (*shape, dtype), strided(shape, strides, dtype=dtype, **options)
        ),
    )
    monkeypatch.setattr(torch, "empty", lambda *given, **options: again(given, empty(*given, **options)))


def entered(call, inside=None):
    """How many Python functions a call enters, or those that one of them enters, itself among them."""
    count, depth = 0, 0

    def trace(frame, event, _):
        nonlocal count, depth
        if event == "call":
            depth += depth > 0 or inside is None or frame.f_code is inside
            count += depth > 0 and frame.f_code.co_filename != __file__
        elif event == "return" and depth > 0:
            depth -= 1

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


FEW = {"hopper causal": 25, "hopper sink": 25, "plain": 25, "cached": 25, "append": 25, "hopper causal backward": 135}


@pytest.mark.parametrize("name", FEW)
def test_a_known_call_enters_few_functions(launched, monkeypatch, name):
    """`attention_backward` is checked each time."""
    same_memory(monkeypatch)
    call, _ = CALLS[name]()
    with torch.no_grad():
        counts = [entered(call) for _ in range(20)]
    assert min(counts[17:]) <= FEW[name], counts


@pytest.mark.parametrize(("backward", "most"), [(False, 25), (True, 30)])
def test_a_known_operator_enters_few_functions(launched, monkeypatch, backward, most):
    """With what torch has around an operator in Python: compiled code calls them."""
    x, do = [torch.randn(2, 300, 4, 128, dtype=BF16) for _ in range(3)], torch.randn(2, 300, 4, 128, dtype=BF16)
    _, recipe, longest = check.check_arguments(*x, tw.Causal(), (), None, None, 0.0, None, None, False, None)
    text, operators = recipe.encode(), torch.ops.tilewise
    o, lse = operators.attention(*x, [], None, text, *longest)
    same_memory(monkeypatch, cycle=4 if backward else 2)

    def call():
        if backward:
            operators.attention_backward(do, None, *x, [], None, o, lse, text, *longest, [])
        else:
            operators.attention(*x, [], None, text, *longest)

    with torch.no_grad():
        counts = [entered(call) for _ in range(72)]
    assert 0 < min(counts[68:]) <= most, counts


def test_a_known_backward_enters_few_functions(launched, monkeypatch):
    same_memory(monkeypatch, cycle=4)  # o, dq, dk and dv
    call, _ = trained("causal")
    counts = [entered(call, eager._Eager.backward.__code__) for _ in range(72)]
    assert 0 < min(counts[68:]) <= 20, counts


def trained(name, heads=4, more=()):
    """Return a forward with gradients and its backward, and the tensors. `more`: options, and the length N."""
    options = {**OPTIONS[name](), **dict(more)}
    rows = (600,) if "layout" in options else (2, options.pop("N", 300))
    x = [torch.randn(*rows, h, 128, dtype=BF16, requires_grad=True) for h in (4, heads, heads)]
    do = torch.randn(*rows, 4, 128, dtype=BF16)
    extra = [each for each in options.values() if isinstance(each, torch.Tensor)]
    extra += [t for each in options.values() for t in getattr(each, "tensors", ())]
    learn = [*x, *(t for t in extra if t.requires_grad)]
    return lambda: torch.autograd.grad(tw.attention(*x, **options), learn, do), [*x, do, *extra]


def learned_bias(*shape):
    """Options of a call of 49 tokens with a bias that learns."""
    return {"N": 49, "score": tw.Bias(torch.randn(*shape, 49, 49, dtype=BF16, requires_grad=True)), "backend": "triton"}


def trained_launches(launched, call, tensors):
    launched.clear()
    grads = call()
    names = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}
    return [flat(each, names) for each in launched], [(g.shape, g.dtype, g.stride()) for g in grads]


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("more", [{}, {"backend": "triton"}, {"backend": "triton", "N": 60}], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_launched_as_without(launched, monkeypatch, name, heads, more):
    if "N" in more and name in ("packed", "prefix", "bias"):
        pytest.skip("their tensors have another length")
    for _ in range(3):
        call, tensors = trained(name, heads, more)
        call()
    call, tensors = trained(name, heads, more)
    found = trained_launches(launched, call, tensors)
    forget(monkeypatch)
    call, tensors = trained(name, heads, more)
    assert found == trained_launches(launched, call, tensors)


def test_a_backward_is_repeated_where_it_is_plain(launched, monkeypatch):
    """It then builds no launch, and what passes between its kernels lies in one workspace."""
    for case in [
        *product(("full", "causal", "dropout", "packed"), (4, 2, 1)),
        *(("full", 4, {"backend": "triton", "N": N}) for N in (300, 60)),
        *((name, 2, {"backend": "triton"}) for name in ("causal", "deterministic", "packed", "sink")),
    ]:
        for _ in range(2):
            trained(*case)[0]()
        with monkeypatch.context() as patch:
            patch.setattr(host.Launch, "run", refuse)
            patch.setattr(Replay, "run", refuse)
            call, tensors = trained(*case)
            launches, grads = trained_launches(launched, call, tensors)
        assert len(launches) > 1
        assert [shape for shape, *_ in grads] == [t.shape for t in tensors[:3]]


@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 4), ()], ids=str)
def test_a_backward_of_a_bias_that_learns_is_repeated(launched, monkeypatch, shape):
    for _ in range(2):
        trained("full", 4, learned_bias(*shape))[0]()
    with monkeypatch.context() as patch:
        patch.setattr(host.Launch, "run", refuse)
        patch.setattr(Replay, "run", refuse)
        found = trained_launches(launched, *trained("full", 4, learned_bias(*shape)))
    forget(monkeypatch)
    assert found == trained_launches(launched, *trained("full", 4, learned_bias(*shape)))
    assert found[1][3][0] == (*shape, 49, 49)


@pytest.mark.parametrize("name", ["full", "packed"])
@pytest.mark.parametrize(
    "more", [{"backend": "hopper"}, {"backend": "triton"}, {"backend": "triton", "N": 60}, {"bias": 1}], ids=str
)
def test_a_backward_of_a_sink_that_learns_is_repeated(launched, monkeypatch, name, more):
    """Also beside a bias that learns. No operation of torch follows the launches of the sink alone."""
    if name == "packed" and more.keys() & {"N", "bias"}:
        pytest.skip("their tensors have another length")

    def options():
        return (learned_bias(4) if "bias" in more else more) | {"sink": torch.randn(4, requires_grad=True)}

    for _ in range(2):
        trained(name, 4, options())[0]()
    with monkeypatch.context() as patch:
        patch.setattr(host.Launch, "run", refuse)
        patch.setattr(Replay, "run", refuse)
        found = trained_launches(launched, *trained(name, 4, options()))
    forget(monkeypatch)
    assert found == trained_launches(launched, *trained(name, 4, options()))
    assert ((4,), torch.float32, (1,)) in found[1]


class Passing(TorchDispatchMode):
    """A mode that changes nothing. Under one, as in compiled code, calls come to a back end by operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("more", [{"backend": "hopper"}, {"backend": "triton"}], ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, "learned bias"])
def test_operators_repeat_what_they_have_launched(launched, monkeypatch, name, more):
    """Forward and backward, of what eager calls repeat; launches and gradients are those of calls made anew."""

    def made():
        call, tensors = trained("full", 4, learned_bias(4)) if name == "learned bias" else trained(name, 4, more)
        with Passing():
            return trained_launches(launched, call, tensors)

    made(), made()
    with monkeypatch.context() as patch:
        if name not in ("bias", "deterministic"):
            patch.setattr(host.Launch, "run", refuse)
            patch.setattr(Replay, "run", refuse)
        found = made()
    forget(monkeypatch)
    assert found == made()
    assert len(found[0]) > 1


def test_operators_give_the_gradients_that_are_wanted(launched):
    options = learned_bias(4)
    q, k, v = (torch.randn(2, 49, 4, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    (bias,) = options["score"].tensors
    for leaves in ([q], [q, bias], [bias], [k, bias]) * 3:
        with Passing():
            o, lse = tw.attention(q, k, v, score=options["score"], backend="triton", return_lse=True)
            for of in ((o,), (o, lse), (lse,)):
                grads = torch.autograd.grad(of, leaves, [torch.ones_like(t) for t in of], retain_graph=True)
                assert [grad.shape for grad in grads] == [t.shape for t in leaves]


def test_a_sink_that_learns_by_operations_of_torch_is_not_repeated(launched):
    """Where no back end is named, and a GPU has yet to run the kernel."""
    for _ in range(3):
        *_, sink = trained("full", 4, {"sink": torch.randn(4, requires_grad=True)})[0]()
        assert sink.shape == (4,)


def test_a_backward_gives_the_gradients_that_are_wanted(launched):
    """Those of q at first, then that of the bias, too: autograd tells a backward each time."""
    options = learned_bias(4)
    q, k, v = (torch.randn(2, 49, 4, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    (bias,) = options["score"].tensors
    for leaves in ([q], [q], [q], [q, bias], [bias], [k, bias], [q], [bias]) * 2:
        o = tw.attention(q, k, v, score=options["score"], backend="triton")
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
        assert [grad.shape for grad in grads] == [t.shape for t in leaves]


def test_whether_gradients_are_enabled_is_told_apart(launched):
    x = [torch.randn(2, 300, 4, 128, dtype=BF16, requires_grad=True) for _ in range(3)]
    for enabled in (False, False, False, True, True, True, False):
        with torch.set_grad_enabled(enabled):
            assert tw.attention(*x).requires_grad == enabled
    o = tw.attention(*x)
    for _ in range(3):
        (dq,) = torch.autograd.grad(o.sum(), x[0], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            dq.sum().backward()
