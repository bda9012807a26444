"""tilewise.rotary and rotary_qk: against complex multiplication in fp64, on both roads and in both forms."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tilewise.call.backend import launch_module
from tilewise.rotary.api import rotary, rotary_qk
from tilewise.rotary.in_torch import Rotation, rotate_in_torch
from tilewise.values.rotation import pairs

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if CUDA else "cpu"
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
POSITIONS = 41

module = importlib.import_module("tilewise.rotary.op")  # tilewise.rotary is also the function

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(params=["torch", pytest.param("kernel", marks=needs_triton)])
def form(request, monkeypatch):
    """Runs a test in plain torch, then by the kernel (on a CPU in Triton's interpreter)."""
    run = {"torch": lambda xs, rotation: [rotate_in_torch(x, rotation) for x in xs], "kernel": by_kernel}
    monkeypatch.setattr(module, "run", run[request.param])
    return request.param


def by_kernel(xs, rotation):
    return launch_module("rotary").launch(xs, rotation)


def tables(R: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    angle = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), frequency).to(DEVICE)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def random(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE).to(dtype).requires_grad_(grad)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """The truth: pairs are complex numbers, times cos + i sin. position (B, S), packed (T,)."""
    R = 2 * cos.shape[1]
    y = x.double().clone()
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    z = torch.complex(y[..., first], y[..., second]) * torch.complex(cos.double(), sin.double())[position][..., None, :]
    y[..., first], y[..., second] = z.real, z.imag
    return y


def assert_rounded(y: Tensor, truth: Tensor, ulps: float = 2.0) -> None:
    assert y.is_contiguous()
    assert not y.isnan().any()
    bound = ulps * torch.finfo(y.dtype).eps * (truth.abs() + 1.0)
    assert ((y.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("H", "D", "R"), [(1, 8, 8), (3, 12, 6), (9, 10, 2), (2, 7, 6)])
def test_matches_complex_multiplication(form, dtype, interleaved, H, D, R):
    x, (cos, sin) = random(2, 5, H, D, dtype=dtype), tables(R, dtype)
    y = rotary(x, cos, sin, interleaved=interleaved, offsets=4)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert_rounded(y, rotated(x, cos, sin, torch.arange(4, 9).expand(2, 5), interleaved))
    assert torch.equal(y[..., R:], x[..., R:])  # dimensions past R are copied, bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tables_may_have_another_type(form, dtype):
    x = random(1, 6, 2, 8, dtype=dtype)
    for table_type in TYPES:
        cos, sin = tables(8, table_type)
        assert_rounded(rotary(x, cos, sin), rotated(x, cos, sin, torch.arange(6).expand(1, 6), False))


def strided(x: Tensor, kind: str) -> Tensor:
    """The values of x (B, S, H, D) with other strides."""
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "dimensions first":
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if kind == "every other":
        return x.repeat_interleave(2, -1)[..., ::2]
    if kind == "part of qkv":
        return torch.stack([x, x + 1.0, x + 2.0], 2)[:, :, 0]
    return x[:1, :, :1].expand(x.shape)


@pytest.mark.parametrize("kind", ["heads first", "dimensions first", "every other", "part of qkv", "expanded"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides(form, kind, interleaved):
    cos, sin = tables(6, torch.float32)
    x = strided(random(2, 5, 3, 8, dtype=torch.float32), kind)
    sparse, wide = torch.stack([cos, cos + 1.0], -1)[..., 0], torch.cat([sin, cos], 1)[:, :3]  # tables are views, too
    y = rotary(x, sparse, wide, interleaved=interleaved)
    assert torch.equal(y, rotary(x.contiguous(), cos, sin, interleaved=interleaved))
    assert y.is_contiguous()
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_shift_each_sequence(form, dtype):
    x, (cos, sin) = random(3, 4, 2, 8, dtype=torch.float32), tables(8, torch.float32)
    offsets = torch.tensor([0, 17, POSITIONS - 4], dtype=dtype, device=DEVICE)
    y = rotary(x, cos, sin, offsets=offsets)
    for b, offset in enumerate(offsets.tolist()):
        assert torch.equal(y[b : b + 1], rotary(x[b : b + 1], cos, sin, offsets=offset))


@pytest.mark.parametrize("lengths", [(5, 1, 7), (0, 4, 0, 0, 9, 0), (13,), (1,) * 13], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
def test_packed_sequences_rotate_like_padded_ones(form, lengths, shifted):
    x, (cos, sin) = random(13, 3, 8, dtype=torch.float32), tables(6, torch.float32)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    offsets = torch.arange(len(lengths), device=DEVICE) * 2 if shifted else 5
    y = rotary(x, cos, sin, offsets=offsets, cu_seqlens=cu)
    for b, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        alone = rotary(x[None, start:end], cos, sin, offsets=2 * b if shifted else 5)
        assert torch.equal(y[start:end], alone[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [(4, 1), (1, 4), (9, 9), (3, 17)], ids=str)
def test_q_and_k_rotate_together_as_alone(form, packed, heads):
    shape = (10,) if packed else (2, 5)
    q, k = (random(*shape, H, 12, dtype=torch.float32) for H in heads)
    cos, sin = tables(8, torch.float32)
    cu = torch.tensor([0, 3, 10], dtype=torch.int32, device=DEVICE) if packed else None
    for interleaved in (False, True):
        options = {"interleaved": interleaved, "offsets": 3, "cu_seqlens": cu}
        together = rotary_qk(q, k, cos, sin, **options)
        assert torch.equal(together[0], rotary(q, cos, sin, **options))
        assert torch.equal(together[1], rotary(k, cos, sin, **options))


@needs_triton
def test_q_and_k_take_one_launch(monkeypatch):
    from tilewise.rotary.kernel import rotary_embedding

    launches, run = [], rotary_embedding.run
    monkeypatch.setattr(
        rotary_embedding, "run", lambda *given, **options: launches.append(len(given[0])) or run(*given, **options)
    )
    monkeypatch.setattr(module, "run", by_kernel)
    q, k = random(1, 3, 4, 8, grad=True), random(1, 3, 2, 8, grad=True)
    y_q, y_k = rotary_qk(q, k, *tables(8))
    assert launches == [2]
    (y_q.sum() + y_k.sum()).backward()
    assert launches == [2, 2]
    sum(y.sum() for y in rotary_qk(q, k.detach(), *tables(8))).backward()
    assert launches == [2, 2, 2, 1]


@needs_triton
def test_the_kernel_fuses_no_products_and_sums(monkeypatch):
    """So its bits are those of plain torch, and of the pass that rotates q and k before it writes 8-bit codes."""
    from tilewise.rotary.kernel import rotary_embedding

    kernel, seen = rotary_embedding, {}
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *given, **options: seen.update(options) or run(*given, **options))
    monkeypatch.setattr(module, "run", by_kernel)
    rotary(random(1, 3, 4, 8), *tables(8))
    assert seen["enable_fp_fusion"] is False


def test_scores_depend_on_relative_position_only():
    cos, sin = tables(16)
    q, k = random(1, 1, 1, 16), random(1, 1, 1, 16)

    def score(m: int, n: int) -> float:
        return (rotary(q, cos, sin, offsets=m) * rotary(k, cos, sin, offsets=n)).sum().item()

    assert score(3, 1) == pytest.approx(score(32, 30), rel=1e-12)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(form, interleaved, packed):
    shape = (6,) if packed else (2, 3)
    q, k = random(*shape, 2, 6, grad=True), random(*shape, 1, 6, grad=True)
    cos, sin = tables(4)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE) if packed else None
    offsets = torch.tensor([2, 7], device=DEVICE)

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_qk(q, k, cos, sin, interleaved=interleaved, offsets=offsets, cu_seqlens=cu)

    assert torch.autograd.gradcheck(run, (q, k), fast_mode=form == "kernel")
    assert torch.autograd.gradgradcheck(run, (q, k), fast_mode=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_gradient_is_the_rotation_back(form, dtype):
    x, (cos, sin) = random(2, 5, 3, 10, dtype=dtype, grad=True), tables(8, torch.float32)
    dy = random(2, 3, 5, 10, dtype=dtype).transpose(1, 2)  # a gradient need not be contiguous
    (dx,) = torch.autograd.grad(rotary(x, cos, sin, offsets=2), x, dy)
    assert dx.dtype == dtype
    assert torch.equal(dx, rotary(dy, cos, -sin, offsets=2))


@pytest.mark.parametrize("road", ["eager", "operator"])
def test_only_the_gradients_asked_for(form, road, monkeypatch):
    if road == "operator":
        monkeypatch.setattr(module, "intercepted", lambda *x: True)
    cos, sin = tables(8)
    x = [random(1, 3, 2, 8), random(1, 3, 2, 8)]
    expected = rotary(torch.ones_like(x[0]), cos, -sin)
    for which in (0, 1):  # one of them needs a gradient
        q, k = (t.clone().requires_grad_(n == which) for n, t in enumerate(x))
        outputs = rotary_qk(q, k, cos, sin)
        outputs[which].sum().backward()
        assert torch.equal((q, k)[which].grad, expected)
        assert (q, k)[1 - which].grad is None
    for which in (0, 1):  # one of the results is used
        q, k = (t.clone().requires_grad_() for t in x)
        rotary_qk(q, k, cos, sin)[which].sum().backward()
        assert torch.equal((q, k)[which].grad, expected)
        other = (q, k)[1 - which].grad
        assert other is None or not other.any()


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=str)
def test_nothing_to_rotate(form, shape):
    x, (cos, sin) = random(*shape, grad=True), tables(8)
    y = rotary(x, cos, sin)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    packed = random(0, 2, 8)
    for cu in ([0], [0, 0, 0]):
        cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
        assert rotary(packed, cos, sin, cu_seqlens=cu_seqlens).shape == packed.shape
    y_q, y_k = rotary_qk(random(2, 5, 0, 8), random(2, 5, 3, 8), cos, sin)
    assert y_q.shape[2] == 0
    assert not y_k.isnan().any()


@needs_triton
@pytest.mark.parametrize("offset", [-7, POSITIONS - 2, 2**40])
def test_kernel_clamps_positions(offset):
    x, (cos, sin) = random(1, 4, 2, 8), tables(8)
    position = (torch.arange(4) + offset).clamp(0, POSITIONS - 1)[None]
    (y,) = by_kernel([x], Rotation(cos, sin, None, None, offset, False))
    assert_rounded(y, rotated(x, cos, sin, position, False), ulps=4)
    assert torch.equal(y, rotate_in_torch(x, Rotation(cos, sin, None, None, offset, False)))
    (y,) = by_kernel([x], Rotation(cos, sin, torch.tensor([offset], device=DEVICE), None, 0, False))
    assert_rounded(y, rotated(x, cos, sin, position, False), ulps=4)


@needs_triton
@pytest.mark.parametrize("cu", [[0, 900, -900, 6], [4, 2, 9, 1], [-5, -5, -5, -5]], ids=str)
def test_kernel_stays_in_bounds_with_bad_cu_seqlens(cu):
    x, (cos, sin) = random(6, 2, 8), tables(8)
    cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    (y,) = by_kernel([x], Rotation(cos, sin, None, cu_seqlens, 0, False))
    norms = [pairs(t, 8, False) for t in (x, y)]
    before, after = (first.square() + second.square() for first, second in norms)
    torch.testing.assert_close(after, before)  # each row rotated by some row of the tables


@needs_triton
@pytest.mark.parametrize("dimension", range(4))
def test_kernel_addresses_beyond_32_bits(dimension, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    strides, shape = [8, 8, 8, 1], [1, 1, 1, 4]
    strides[dimension] = 2**30 + 8  # fits 32 bits; three times that does not
    shape[dimension] = 4
    try:
        memory = torch.empty(2**30 * 3 + 64, dtype=torch.float16, device=DEVICE)  # on a CPU only what is touched exists
    except RuntimeError as error:
        pytest.skip(f"no room for 6 GiB of addresses: {error}")
    x = memory.as_strided(shape, strides)
    x.copy_(random(*shape))
    for R in (2, 4):
        rotation = Rotation(*tables(R), None, None, 3, False)
        (y,) = by_kernel([x], rotation)
        assert torch.equal(y, rotate_in_torch(x.contiguous(), rotation))


@pytest.mark.skipif(not CUDA, reason="more than 2^31 elements need a GPU's memory")
def test_more_than_2_to_the_31_elements():
    B, S, H, D = 2, 2**15 + 1, 256, 128
    x = torch.ones(1, 1, 1, 1, dtype=torch.float16, device=DEVICE).expand(B, S, H, D)
    angle = torch.rand(S, D // 2, device=DEVICE)
    y = rotary(x, angle.cos(), angle.sin())
    assert y.numel() > 2**31
    assert torch.equal(y[-1, -1, -1], rotary(x[:1, :1, :1], angle.cos()[-1:], angle.sin()[-1:])[0, 0, 0])


OFFLINE = """
import re, sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tilewise.rotary.launch import tiles
from tilewise.rotary import kernel as rotary

name = sys.argv[1]
target = GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)
answers = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
driver.set_active(type("Driver", (), {k: lambda self, *_, v=v: v for k, v in answers.items()})())
q, k = (torch.empty(2, 64, H, 128, dtype=torch.float16, device="meta") for H in (32, 8))
table, cu = torch.empty(128, 64, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
tables = rotary.Tables(table, table, *table.stride()[:1] * 2)
heads = tuple(rotary.Heads(x, x, x.shape[2], *x.stride()) for x in (q, k))
constants = tiles(32, 64, 128)
for interleaved in (False, True):
    kernel = rotary.rotary_embedding.warmup(
        heads, tables, rotary.Places(None, cu), 128, 64, 2, 128, 0, 1.0, 64, 128, INTERLEAVED=interleaved, **constants,
        grid=(1,),
    )
    text = kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]
    wide = [len(re.findall(p, text)) for p in (r"ld.global\\S*v4|load_dwordx4", r"st.global\\S*v4|store_dwordx4")]
    print(*wide, len(re.findall(r"(?:ld|st)\\.local|scratch_", text)))
"""


@needs_triton
@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_compiles_to_wide_accesses_without_spilling(target):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", OFFLINE, target]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.count("\n") == 2, run.stderr
    for line in run.stdout.splitlines():
        loads, stores, local = map(int, line.split())
        accesses = (
            2 * 4096 // (256 if target.startswith("gfx") else 128) // 8
        )  # q's and k's tiles, 8 elements at a time
        assert loads >= accesses
        assert stores >= accesses
        assert local == 0


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    q, k = (random(*((6,) if packed else (2, 3)), H, 8, dtype=torch.float32, grad=True) for H in (2, 1))
    cos, sin = tables(6, torch.float32)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE) if packed else None
    offsets = torch.tensor([2, 7], device=DEVICE)
    across = q.detach().transpose(-2, -3).contiguous().transpose(-2, -3).requires_grad_()
    for xs in ([q], [across, k]):
        for inverse in (False, True):
            torch.library.opcheck(torch.ops.tilewise.rotary, (xs, cos, sin, offsets, cu, 1, True, inverse))


def test_compiles_once_for_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    cos, sin = tables(8)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(q: Tensor, k: Tensor, offset: int) -> Tensor:
        q, k = rotary_qk(q, k, cos, sin, offsets=offset)
        return (q * k).sum()

    for S, offset in ((5, 3), (9, 4), (12, 6)):
        q, k = random(2, S, 3, 8, grad=True), random(2, S, 3, 8, grad=True)
        grads = torch.autograd.grad(run(q, k, offset), (q, k))
        y_q, y_k = rotary_qk(q, k, cos, sin, offsets=offset)
        expected = torch.autograd.grad((y_q * y_k).sum(), (q, k))
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_meta_tensors():
    x, (cos, sin) = random(2, 3, 1, 8), tables(8)
    y = rotary(x.transpose(1, 2).to("meta").transpose(1, 2), cos.to("meta"), sin.to("meta"))
    assert y.shape == x.shape
    assert y.is_meta
    assert y.is_contiguous()


def test_offsets_and_cu_seqlens_may_have_any_stride(form):
    (cos, sin), x = tables(8), random(3, 4, 2, 8)
    offsets = torch.tensor([[0, 9], [17, 9], [30, 9]], device=DEVICE)[:, 0]
    assert torch.equal(rotary(x, cos, sin, offsets=offsets), rotary(x, cos, sin, offsets=offsets.clone()))
    cu = torch.tensor([[0, 9], [5, 9], [12, 9]], dtype=torch.int32, device=DEVICE)[:, 0]
    packed = x.flatten(0, 1)
    assert torch.equal(rotary(packed, cos, sin, cu_seqlens=cu), rotary(packed, cos, sin, cu_seqlens=cu.clone()))


@pytest.mark.parametrize("mapped", ["x", "q of qk", "cos", "x and cos", "offsets", "packed x", "last dimension"])
def test_vmap(form, mapped):
    (cos, sin), x = tables(6), random(3, 2, 4, 2, 8)
    cu, offsets = torch.tensor([0, 3, 4], dtype=torch.int32, device=DEVICE), torch.tensor([[0, 2], [5, 1], [9, 9]])
    offsets, cosines = offsets.to(DEVICE), random(3, *cos.shape)
    f, given, dims = {
        "x": (lambda x: rotary(x, cos, sin), (x,), 0),
        "q of qk": (lambda q: rotary_qk(q, x[0], cos, sin), (x,), 0),
        "cos": (lambda c: rotary(x[0], c, sin), (cosines,), 0),
        "x and cos": (lambda x, c: rotary(x, c, sin), (x, cosines), 0),
        "offsets": (lambda x, at: rotary(x, cos, sin, offsets=at), (x, offsets), 0),
        "packed x": (lambda x: rotary(x, cos, sin, cu_seqlens=cu), (x[:, 0],), 0),
        "last dimension": (lambda x: rotary(x, cos, sin), (x.movedim(0, -1),), -1),
    }[mapped]
    found = torch.vmap(f, in_dims=dims)(*given)
    each = [f(*one) for one in zip(*(t.unbind(dims) for t in given), strict=True)]
    if mapped == "q of qk":
        found, each = torch.stack(found), [torch.stack(pair) for pair in each]
    assert torch.equal(found, torch.stack(each, 1 if mapped == "q of qk" else 0))


def test_gradients_under_torch_func(form):
    (cos, sin), x, dy = tables(6), random(3, 2, 4, 2, 8), random(2, 4, 2, 8)

    def f(x):
        return (rotary(x, cos, sin, offsets=2) * dy).sum()

    assert torch.equal(torch.func.grad(f)(x[0]), rotary(dy, cos, -sin, offsets=2))
    expected = torch.stack([torch.func.grad(f)(one) for one in x])
    assert torch.equal(torch.vmap(torch.func.grad(f))(x), expected)


def test_forward_mode_of_the_tables_is_refused():
    (cos, sin), x = tables(8), random(2, 4, 2, 8)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda c: rotary(x, c, sin), (cos,), (cos,))
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.hessian(lambda x: rotary(x, cos, sin).sum())(x)


def test_forward_mode_is_refused():
    x, (cos, sin) = random(1, 3, 2, 8), tables(8)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: rotary(x, cos, sin), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        rotary_qk(x, torch.autograd.forward_ad.make_dual(x, x), cos, sin)


X, COS = torch.zeros(2, 5, 3, 8), torch.zeros(POSITIONS, 4)
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
WRONG = [
    ({"x": [1.0]}, TypeError, "x must be a tensor.*got list"),
    ({"x": X.int()}, TypeError, "x must be of type.*got torch.int32; convert"),
    ({"x": X[0]}, ValueError, r"x must have shape \(batch.*got \(5, 3, 8\); pass cu_seqlens"),
    ({"cu_seqlens": CU}, ValueError, r"x must have shape \(T, heads, head size\), got \(2, 5, 3, 8\)"),
    ({"cos": None}, TypeError, "cos must be a tensor.*got NoneType"),
    ({"sin": COS.int()}, TypeError, "sin must be of type"),
    ({"cos": COS.to("meta")}, ValueError, "all tensors must be on cpu, got cos on meta"),
    ({"cos": COS.clone().requires_grad_()}, ValueError, r"cos must have no gradient.*cos.detach\(\)"),
    ({"sin": COS[:-1]}, ValueError, r"cos and sin must have one shape \(positions, R / 2\), got sin \(40, 4\)"),
    ({"cos": COS[None], "sin": COS[None]}, ValueError, "one shape"),
    ({"cos": COS[:, :0], "sin": COS[:, :0]}, ValueError, "between 1 and D / 2 = 4 columns.*got 0"),
    ({"cos": COS.repeat(1, 2), "sin": COS.repeat(1, 2)}, ValueError, "got 8"),
    ({"cos": COS[:4], "sin": COS[:4]}, ValueError, "every position up to 4, got 4 rows; make them longer"),
    ({"offsets": 37}, ValueError, "every position up to 41, got 41 rows"),
    ({"offsets": -1}, ValueError, "offsets must be >= 0, got -1"),
    ({"offsets": 1.0}, TypeError, r"offsets must be an int or an integer tensor of shape \(B,\), got 1.0"),
    ({"offsets": True}, TypeError, "got True"),
    ({"offsets": torch.zeros(2)}, TypeError, "offsets must be of type int32, int64, got torch.float32"),
    (
        {"offsets": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        r"offsets must have shape \(B,\) = \(2,\), got \(3,\)",
    ),
    ({"offsets": torch.tensor([0, 37])}, ValueError, r"positions must lie in \[0, 41\).*got 0 to 41"),
    ({"offsets": torch.tensor([-2, 0])}, ValueError, "got -2 to 4"),
    ({"x": X[0], "cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a tensor of type int32, got list"),
    ({"x": X[0], "cu_seqlens": CU.long()}, TypeError, "cu_seqlens must be of type int32, got torch.int64"),
    ({"x": X[0], "cu_seqlens": CU[None]}, ValueError, r"cu_seqlens must have shape \(B \+ 1,\), got \(1, 3\)"),
    ({"x": X[0], "cu_seqlens": CU[:1]}, ValueError, "got no sequence; pass"),
    ({"x": X[0], "cu_seqlens": CU + 1}, ValueError, r"start at 0.*total of 5 rows, got \[1, 3, 6\]"),
    ({"x": X[0], "cu_seqlens": CU.flip(0)}, ValueError, "never decrease"),
    ({"x": X[0], "cu_seqlens": CU, "offsets": POSITIONS}, ValueError, "every position up to 41, got 41 rows"),
    ({"x": X[0], "cu_seqlens": CU, "offsets": 39}, ValueError, "got 39 to 41"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments(change, error, message):
    arguments = {"x": X, "cos": COS, "sin": COS, **change}
    with pytest.raises(error, match=message):
        rotary(**arguments)


def test_q_and_k_must_fit():
    for k, error, message in (
        (X.half(), TypeError, "one type, got torch.float32 and torch.float16"),
        (X[:, :4], ValueError, r"agree in all but the heads, got \(2, 5, 3, 8\) and \(2, 4, 3, 8\)"),
        (X[..., :6], ValueError, "agree in all but the heads"),
        (X.to("meta"), ValueError, "got k on meta"),
    ):
        with pytest.raises(error, match=message):
            rotary_qk(X, k, COS[:, :3], COS[:, :3])


def test_tables_with_gradients_pass_without_grad_mode():
    with torch.no_grad():
        assert rotary(X, COS.clone().requires_grad_(), COS).shape == X.shape


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import tilewise, torch\n"
        "from tilewise.call.backend import launch_module\n"
        "x = torch.ones(1, 2, 1, 4, requires_grad=True)\n"
        "tilewise.rotary(x, torch.zeros(2, 2), torch.ones(2, 2)).sum().backward()\n"
        "assert launch_module('rotary') is None\n"
        "print(x.grad.flatten().tolist())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0]", run.stderr
