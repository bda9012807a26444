"""The CPU back end: memory linear in the length, and no trace left in torch's settings."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from conformance.test_conformance import chosen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise as tw
from tilewise.call.backend import load
from tilewise.call.check import describe
from tilewise.call.operands import Operands
from tilewise.call.problem import matmul_setting
from tilewise.call.recipe import Recipe


class Largest(TorchDispatchMode):
    """Records the most memory that any tensor made while it is on owns, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.bytes = max([self.bytes, *made])
        return result


def largest_tensor(length, fuse, **options):
    """The largest tensor of a forward and a backward of the CPU back end itself."""
    cpu = load("cpu")
    q, k, v, do = (torch.randn(1, length, 2, 16) for _ in range(4))
    mask, score = options.pop("mask", tw.Full()), options.pop("score", ())
    extra = [t for value in (*mask.parts, *score) for t in value.tensors]
    recipe = Recipe(tuple(part.plain for part in mask.parts), tuple(change.plain for change in score), **options)
    x = Operands(q, k, v, tuple(extra))
    seed = torch.tensor(3) if options.get("dropout") else None
    with chosen("cpu" if fuse else "cpu-tiled"), Largest() as seen:
        problem = describe(x, recipe, (0, 0), (False,) * len(extra))
        saved = cpu.forward(problem, x, seed)
        cpu.backward(problem, x, saved, do, None)
    return seen.bytes


OPTIONS = {
    "full": {}, "causal": {"mask": tw.Causal()}, "window": {"mask": tw.Causal() & tw.Window(100, 0)},
    "softcap": {"score": (tw.SoftCap(2.0),)}, "dropout": {"dropout": 0.1}, "deterministic": {"deterministic": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_the_tiled_path_makes_no_tensor_that_grows_with_the_square(name):
    tile = 8 << 20  # dropout's random words of one tile, int64, for two heads of 256 x 256 and their parts
    assert 4 * tile <= 2 * 2048 * 2048 * 4  # the square
    assert largest_tensor(2048, fuse=False, **OPTIONS[name]) <= tile


def test_the_largest_tensor_is_linear_in_the_length():
    short, long = (largest_tensor(length, fuse=False, mask=tw.Window(100, 0)) for length in (4096, 16384))
    assert long <= 4 * short


def test_the_fused_path_makes_no_tensor_that_grows_with_the_square():
    assert largest_tensor(4096, fuse=True) <= 8 << 20


class Products(TorchDispatchMode):
    """Counts the tiled path's products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_)
        return function(*args, **(kwargs or {}))


def products(mask, *shape, layout=()):
    """How many of them a forward makes, of q, k and v of one shape; `layout`: cu_seqlens, and the longest sequence."""
    q = torch.randn(shape)
    layouts = {"layout": ("Varlen", ("cu_q", "cu_k"))} if layout else {}
    recipe = Recipe(tuple(part.plain for part in mask.parts), **layouts)
    x = Operands(q, q, q, (layout[0], layout[0]) if layout else ())
    with chosen("cpu-tiled"), Products() as seen:
        load("cpu").forward(describe(x, recipe, layout[1:] * 2 or (0, 0)), x, None)
    return seen.count


def test_hidden_tiles_are_not_visited():
    """A window's work is linear in the length: as many products as tiles that it touches."""
    masks = tw.Full(), tw.Causal(), tw.Causal() & tw.Window(255, 0)
    full, causal, window = (products(mask, 1, 4096, 1, 8) for mask in masks)
    assert full == 2 * 16 * 16
    assert causal == 2 * 16 * 17 / 2
    assert window <= 2 * 16 * 2


def test_short_batch_entries_are_computed_together():
    assert products(tw.Causal(), 1024, 4, 8, 16) == 2 * 16
    assert products(tw.Causal(), 1, 512, 8, 16) == products(tw.Causal(), 2, 512, 8, 16) / 2


def test_short_packed_sequences_of_one_length_are_computed_together():
    ends = torch.arange(0, 4100, 4, dtype=torch.int32)  # 1025 sequences of four rows
    assert products(tw.Causal(), 4096, 8, 16, layout=(ends[:1025], 4)) == 2 * 16


@pytest.mark.parametrize(
    ("M", "N", "mask"),
    [(40, 40, tw.Causal()), (7, 300, tw.Full()), (1, 300, tw.Causal()), (1, 300, tw.Full())],
    ids=str,
)
def test_groups_of_heads_and_single_queries_reach_the_fused_kernel(M, N, mask, monkeypatch):
    q, k, v, do = (torch.randn(3, n, h, 16, dtype=torch.float64) for n, h in ((M, 6), (N, 2), (N, 2), (M, 6)))
    results = []
    for path in ("cpu-tiled", "cpu"):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        with chosen(path):
            o, lse = tw.attention(*x, mask=mask, return_lse=True)
            results.append((o, lse, *torch.autograd.grad(o, x, do)))
        for pass_ in ("forward", "backward"):  # from here on there is only the fused kernel
            monkeypatch.setattr(f"tilewise.cpu.tiled.{pass_}", None)
    for fused, tiled in zip(*results, strict=True):
        torch.testing.assert_close(fused, tiled)


SETTINGS = ("bf16", "ieee", "tf32")


@pytest.fixture
def matmul():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matmul_setting_is_put_back(matmul, setting, dtype):
    matmul.fp32_precision = setting
    q = torch.randn(1, 8, 2, 8, dtype=dtype, requires_grad=True)
    tw.attention(q, q, q, score=tw.SoftCap(3.0)).sum().backward()
    assert matmul.fp32_precision == setting


def test_an_inherited_matmul_setting_goes_on_to_be_inherited(matmul):
    of_all, q = torch.backends.mkldnn, torch.randn(1, 8, 2, 8)
    matmul.fp32_precision = "none"
    before = of_all.fp32_precision
    try:
        for setting in ("bf16", "ieee"):
            of_all.fp32_precision = setting
            tw.attention(q, q, q)
            assert matmul.fp32_precision == setting
    finally:
        of_all.fp32_precision = before


def test_the_matmul_setting_is_put_back_after_an_error(matmul, monkeypatch):
    def fail(*args):
        raise MemoryError("no more")

    matmul.fp32_precision = "tf32"
    monkeypatch.setattr("tilewise.cpu.tiled._forward_tile", fail)
    q = torch.randn(1, 8, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(MemoryError, match="no more"):
        tw.attention(q, q, q, score=tw.SoftCap(3.0))
    assert matmul.fp32_precision == "tf32"


def test_a_users_reduced_precision_does_not_reach_fp32_attention(matmul):
    q, k, v = (torch.randn(1, 64, 2, 64) for _ in range(3))
    exact = tw.attention(q, k, v, mask=tw.Window(30, 0))
    matmul.fp32_precision = "bf16"
    assert torch.equal(tw.attention(q, k, v, mask=tw.Window(30, 0)), exact)


@pytest.mark.parametrize(("setting", "asked"), [("ieee", "highest"), ("tf32", "high"), ("none", "highest")])
def test_both_of_torchs_interfaces_for_fp32_products_are_read(matmul, setting, asked):
    on_gpus, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    matmul.fp32_precision = "bf16"  # from here on the older interface raises
    on_gpus.fp32_precision = setting
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert matmul_setting() == asked
    finally:
        on_gpus.fp32_precision = before


def test_threads_do_not_disturb_each_other():
    """fp32 and bf16 calls side by side give what they give alone."""
    calls = [
        (*(torch.randn(1, 300, 2, 32, dtype=dtype) for _ in range(3)), score)
        for dtype in (torch.float32, torch.bfloat16)
        for score in ((), tw.SoftCap(3.0))
    ]
    alone = [tw.attention(q, k, v, score=score) for q, k, v, score in calls]
    wrong = []

    def work(index):
        q, k, v, score = calls[index]
        wrong.extend(index for _ in range(15) if not torch.equal(tw.attention(q, k, v, score=score), alone[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FORKS = """
import os, threading, time, torch
import tilewise as tw
from tilewise.cpu import precision

torch.set_num_threads(1)
matmul = torch.backends.mkldnn.matmul
matmul.fp32_precision = "tf32"
q, x = torch.randn(1, 1024, 8, 64, dtype=torch.bfloat16), torch.randn(1, 4, 1, 8)
inside, over = threading.Event(), threading.Event()
precision.FORK_SECONDS = {seconds}

def work():
    with precision.exact_products(torch.bfloat16):  # a call that lasts as long as the test wants
        inside.set()
        over.wait({holds})

for turn in range(5):
    inside.clear(), over.clear()
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        kept = matmul.fp32_precision
        tw.attention(x, x, x)
        os._exit(0 if kept == matmul.fp32_precision == "tf32" else 3)
    waited = time.monotonic() - begin
    ended = time.monotonic() + 60
    while (result := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < ended:
        time.sleep(0.01)
    if result == (0, 0):
        os.kill(child, 9)
    over.set()
    thread.join()
    tw.attention(x, x, x)
    assert result == (child, 0), ("the child hung, or had another setting", result)
    assert {least} <= waited < 30, waited
    assert matmul.fp32_precision == "tf32"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    ("seconds", "holds", "least"), [(0.1, 300, 0.1), (60, 0.3, 0.0)], ids=["call goes on", "call ends"]
)
def test_a_fork_while_a_call_runs_leaves_the_child_free(seconds, holds, least):
    script = FORKS.format(seconds=seconds, holds=holds, least=least)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_both_paths_agree():
    q, k, v = (torch.randn(2, 40, 2, 16, dtype=torch.float64) for _ in range(3))
    results = []
    for path in ("cpu", "cpu-tiled"):
        with chosen(path):
            results.append(tw.attention(q, k, v, mask=tw.Causal(), return_lse=True))
    for fused, tiled in zip(*results, strict=True):
        torch.testing.assert_close(fused, tiled)


@pytest.mark.parametrize(
    "options", [{"mask": tw.Window(2, 0)}, {"score": tw.SoftCap(3.0)}, {"dropout": 0.2, "seed": 1}]
)
def test_torchs_default_device_does_not_matter(options):
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    o = tw.attention(q, q, q, **options)
    (dq,) = torch.autograd.grad(o.sum(), q)
    with torch.device("meta"):
        o_meta = tw.attention(q, q, q, **options)
        (dq_meta,) = torch.autograd.grad(o_meta.sum(), q, torch.ones((), device="cpu"))
    assert torch.equal(o_meta, o)
    assert torch.equal(dq_meta, dq)


@pytest.mark.parametrize("keys", [5, 40])
def test_logits_that_are_all_minus_infinity_give_a_row_without_keys(keys):
    q = torch.full((1, 1, 1, 8), torch.inf, requires_grad=True)
    k, v = -torch.rand(1, keys, 1, 8), torch.randn(1, keys, 1, 8, requires_grad=True)
    o, lse = tw.attention(q, k, v, return_lse=True)
    assert lse.item() == -torch.inf
    assert not o.any()
    (dv,) = torch.autograd.grad(o.sum(), v)
    assert not dv.any()


def test_the_inputs_are_left_as_they_were():
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    bias, do = torch.randn(40, 40), torch.randn(1, 40, 2, 16)
    copies = [t.clone() for t in (q, k, v, bias, do)]
    x = [t.requires_grad_() for t in (q, k, v, bias)]
    tw.attention(*x[:3], score=[tw.SoftCap(2.0), tw.Bias(x[3])], dropout=0.1).backward(do)
    assert all(torch.equal(t, copy) for t, copy in zip((q, k, v, bias, do), copies, strict=True))
