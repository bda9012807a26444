"""Compiles the kernels of calls for a chip that is not here, and reads what came out.

Run it in a separate process with TRITON_INTERPRET=0, one per target, because Triton keeps compiled kernels by device:

    python tests/triton/offline.py compile sm_90      one JSON line a kernel of every call in `calls`
    python tests/triton/offline.py keys sm_90         one JSON line a call in `lengths`: its kernels' cache keys
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.attention.api import with_defaults
from tilewise.attention.explain import problem_on
from tilewise.call.backend import BACKWARD
from tilewise.call.check import check_arguments
from tilewise.call.operands import Operands
from tilewise.call.problem import Problem
from tilewise.host.gather import empty_sums
from tilewise.triton import launch
from tilewise.triton.chunked import launch as chunked
from tilewise.triton.plan import plan
from tilewise.triton.single import launch as single
from tilewise.triton.tiles import SPECIAL
from tilewise.warm.cross_compile import use_target

sys.path.insert(0, str(Path(__file__).parents[1]))
from known import compile_new, known
from registers import unwritten

gc.set_threshold(200_000, 50, 1000)  # IR is millions of objects, which Python would look through again and again
MAIN = ("sm_80", "sm_90", "sm_100")
"""Targets that get every call; the others get fewer, so that all take a few minutes together."""


def described(target: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Problem, Operands]:
    """The problem of a call on a chip, and its operands."""
    given = with_defaults("attention", options)
    del given["seed"], given["return_lse"]
    x, *rest = check_arguments(q, k, v, **given)
    return problem_on(x, *rest, target), x


def launches(target: str, q: Any, k: Any, v: Any, wanted: bool = False, **options: Any) -> list[launch.Launch]:
    """Every launch of forward and backward of a call with meta tensors; `wanted` asks for gradients of biases
    and sinks."""
    p, x = described(target, q, k, v, **options)
    p = p._replace(wanted=tuple(wanted and t.dtype.is_floating_point and t.ndim in (1, 4) for t in x.extra))
    seed = torch.empty((), dtype=torch.int64, device="meta") if p.recipe.dropout else None
    saved = launch.empty_saved(p, x, seed)
    scratch, grads = launch.empty_scratch(p, x), launch.empty_grads(p, x)
    do, dlse = torch.empty_like(saved.o, dtype=q.dtype), torch.empty_like(saved.lse)
    pl = plan(p)
    if single.fits(p, BACKWARD):
        pl = single.plan(p)
        sums, given = single.empty_sums(p, pl, grads), (saved._replace(o=do), do, dlse)
        backward = single.backward_launches(p, pl, x, *given, None, grads, sums)
        return [*single.forward_launches(p, pl, x, saved), *backward]
    sums, made = empty_sums(p, x, grads, pl.bias), chunked.workspace(p, x)
    backward = launch.backward_launches(p, pl, x, saved._replace(o=do), do, dlse, scratch, grads, sums, made)
    return [*launch.forward_launches(p, pl, x, saved), *backward]


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# What is compiled


class Call(NamedTuple):
    """One call, and which of its kernels are compiled."""

    variant: str
    dtype: torch.dtype
    D: int
    kernels: tuple[str, ...]


MAIN_KERNELS = ("attention_forward", "attention_backward_dkdv", "attention_backward_dq")
"""The kernels that compute the forward pass and the gradients of Q, K and V."""


WIDE_KERNELS = ("attention_forward", "attention_backward_chunk", "attention_backward_chunk_sums")
"""The same above head size 256."""


PARTS = ("wide", "spans", "placed", "placed dropout")
"""What parts of a whole need: results in fp32, Spans, and Prefix, ALiBi and dropout at a place."""


SINGLE = ("attention_forward_single", "attention_backward_single")
"""The kernels of heads whose score matrix is one tile."""


def calls(target: str) -> Iterator[Call]:
    """Full, causal ("plain"), combined, listed and biased calls in the 16-bit type; plain ones in fp32, "ieee" on FMA
    units, and "tf32x3" where it has its own rows; on Hopper, also a call whose strides are 1; what parts of a whole
    need, and heads of one tile, also Swin's, where a chip is main. Two biases in fp32, of which a loop reads more than
    of K and V, where memory is short. A sink that learns. Head size 512 in both types, where a chip takes it; of sm_86
    and sm_89, which are alike, with sm_89."""
    old = target in ("sm_70", "sm_75")
    half = torch.float16 if old else torch.bfloat16
    of_bias = ("attention_backward_renormalize", "attention_backward_gather")
    for D in (64, 128):
        yield Call("plain", half, D, (*MAIN_KERNELS, "attention_backward_delta"))
    yield Call("plain", torch.float32, 64, MAIN_KERNELS)
    yield Call("sink", half, 64, ("attention_backward_sink",))
    yield Call("combined", half, 64 if old else 128, MAIN_KERNELS)
    yield Call("listed", half, 64 if old else 128, ("attention_list_tiles", *of_bias))
    if target in ("sm_86", "sm_120"):  # with little shared memory
        yield Call("biased", half, 128, ("attention_backward_dkdv", "attention_backward_gather"))
        yield Call("two biases", half, 64, ("attention_forward", "attention_backward_dq"))
    if target in MAIN:
        yield Call("full", half, 64, MAIN_KERNELS)
        yield from [Call(variant, half, D, SINGLE) for variant, D in (("single", 64), ("single", 128), ("Swin", 32))]
        yield Call("biased", half, 256, ("attention_backward_gather",))
        yield Call("plain", half, 256, MAIN_KERNELS)
        yield Call("combined", half, 64, MAIN_KERNELS)
        yield Call("plain", torch.float32, 128, MAIN_KERNELS)
        yield Call("listed", half, 64, (*MAIN_KERNELS, "attention_backward_gather"))
    for dtype in (half, torch.float32) if target not in ("sm_70", "sm_75", "sm_86") else ():
        yield Call("plain", dtype, 512, (*WIDE_KERNELS, "attention_backward_delta"))
        yield Call("biased", dtype, 512, of_bias)
        if target in MAIN or target == "gfx942" or dtype == half:
            yield Call("combined", dtype, 512, WIDE_KERNELS)
    if target in ("sm_80", "sm_90"):
        yield Call("ieee", torch.float32, 64, MAIN_KERNELS)
        yield Call("ieee", torch.float32, 128, MAIN_KERNELS)
    if target in ("sm_80", "sm_90", "gfx942"):
        for variant in PARTS:
            yield Call(variant, half, 128, MAIN_KERNELS)
    if target == "sm_90":
        yield Call("two biases", half, 64, ("attention_forward",))
        yield Call("tf32x3", torch.float32, 128, MAIN_KERNELS)
        yield Call("tf32x3", torch.float32, 256, MAIN_KERNELS)
        yield Call("strides of 1", half, 128, (*MAIN_KERNELS, "attention_backward_delta", "attention_backward_gather"))


def launches_of(target: str, call: Call) -> list[launch.Launch]:
    """The launches of a call that are to be compiled."""
    B, S, H = 2, {"single": 64, "Swin": 49}.get(call.variant, 1024), 4
    heads = {"combined": (H, H // 2), "strides of 1": (1, 1)}.get(call.variant, (H, H))
    q, k = (meta(B, S, n, call.D, dtype=call.dtype) for n in heads)
    v = meta(B, S, 1, 1, dtype=call.dtype) if call.variant == "strides of 1" else k
    options = {"mask": tw.Causal(), **options_of(call, B, S, H)}
    named = {one.kernel.fn.__name__: one for one in launches(target, q, k, v, **options)}
    return [named[name] for name in call.kernels]


def options_of(call: Call, B: int, S: int, H: int) -> dict[str, Any]:
    """Options of a variant, beside those of a plain one."""
    lengths, numbers = meta(B, dtype=torch.int32), meta(H, dtype=torch.float32)
    biased = {"score": tw.Bias(meta(1, H, S, S, dtype=call.dtype)), "wanted": True}
    return {
        "plain": {},
        "full": {"mask": tw.Full()},
        "combined": {
            "mask": tw.Causal() & tw.Window(255, 0) & tw.Padding(lengths), "dropout": 0.1,
            "score": [tw.SoftCap(50.0), tw.Alibi(numbers)], "sink": numbers,
        },
        "wide": {"out_dtype": torch.float32},
        "spans": {"mask": tw.Causal() & tw.Spans(*(meta(B, S, dtype=torch.int32) for _ in range(2)))},
        "placed": {"mask": tw.Prefix(lengths), "score": tw.Alibi(numbers), "origin": tw.Origin(64, 128)},
        "placed dropout": {"dropout": 0.1, "origin": tw.Origin(64, 128, 1, 8)},
        "biased": biased,
        "single": {"backend": "triton"},
        "sink": {"sink": numbers, "wanted": True, "backend": "triton"},
        "Swin": biased | {"mask": tw.Full(), "backend": "triton"},
        "two biases": biased | {"score": [tw.Bias(meta(1, H, S, S, dtype=torch.float32)) for _ in range(2)]},
        "listed": biased | {"mask": tw.Dense(meta(S, S, dtype=torch.bool)) & tw.Causal()},
        # strides that Triton makes constants: D_v = 1 of one head, and one bias for all
        "strides of 1": biased | {"score": tw.Bias(meta(1, 1, 1, 1, dtype=call.dtype))},
        **{name: {"precision": name, "backend": "triton"} for name in SPECIAL},
    }[call.variant]  # fmt: skip


def compile_all(target: str) -> Iterator[dict[str, Any]]:
    """What became of every kernel, or the compiler's own sentence if it no longer knows the target."""
    use_target(target)
    try:
        nothing.warmup(meta(1, dtype=torch.float32), grid=(1,))
    except Exception as error:  # whatever the compiler raises
        yield {"refused": " ".join(str(error).split())}
        return
    digests = known(f"triton/offline.py {target}")
    for call in calls(target):
        for one in launches_of(target, call):
            row = {"kernel": one.kernel.fn.__name__, "dtype": str(call.dtype).removeprefix("torch."), "D": call.D}
            row["variant"] = call.variant
            try:
                yield row | read_new(one, digests, lambda kernel: read(kernel)._asdict())
            except Exception as error:  # whatever the compiler raises: the test shows it
                yield row | {"error": f"{type(error).__name__}: {error}"[:2000]}


@triton.jit
def nothing(X):
    """A kernel that every target can have."""
    tl.store(X, 0.0)


# Reading what was compiled


class Compiled(NamedTuple):
    """What one kernel became."""

    shared: int
    """Bytes of shared memory."""
    matrix: tuple[str, ...]
    """The kinds of matrix instructions found."""
    loops: int
    """Innermost loops that hold matrix instructions, or multiply-adds where there are none."""
    spills: int
    """Local loads and stores inside the worst of these loops."""
    registers: int
    tensor_memory: int
    """Columns of tensor memory, on chips that have it."""
    conflicts: int
    """Right factors of FMA units that lie in shared memory by rows, so that reads of neighbouring columns meet in a
    bank."""


def read_new(one: launch.Launch, digests: frozenset[str], reader: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """What a launch became, with the digest of its IR; where that is known to be without faults, that alone."""
    one.kernel.device_caches.clear()
    digest, kernel = compile_new(one.compile, digests)
    return {"ir": digest} | ({"known": True} if kernel is None else reader(kernel))


def read(kernel: Any) -> Compiled:
    """Disassembles a compiled kernel."""
    if "cubin" in kernel.asm:
        text = sass(kernel.asm["cubin"])
        matrix, otherwise = r"\b(HMMA|HGMMA|IMMA|IGMMA|QMMA|QGMMA|UTC[A-Z]*MMA)\b", r"\bFFMA2?\b"
        local = r"\b(?:LDL|STL)\b"
        registers = re.search(r"REG:(\d+)", text)
    else:
        text = kernel.asm["amdgcn"]
        matrix, otherwise = r"\b(v_mfma|v_wmma)", r"\bv_(?:pk_)?fmac?_f32|\bv_dot"
        local = r"\bscratch_(?:load|store)|\bbuffer_(?:load|store)\S* v\S+, off, .*Folded (?:Spill|Reload)"
        registers = re.search(r"\.vgpr_count: *(\d+)", text)
    found = tuple(sorted(set(re.findall(matrix, text))))
    loops = innermost_loops(text, matrix if found else otherwise)
    spills = max((len(re.findall(local, body)) for body in loops), default=0)
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    conflicts = 0 if found else right_factors_by_rows(kernel.asm["ttgir"])
    return Compiled(kernel.metadata.shared, found, len(loops), spills, int(registers.group(1)), columns, conflicts)


def registers_and_spills(kernel: Any) -> tuple[int, int]:
    """A kernel's registers, and the bytes or registers that it spills."""
    if "cubin" in kernel.asm:
        from studies.accumulation.compiled import resources

        return resources(kernel.asm["cubin"])
    counts = (re.findall(rf"\.{name}:\s*(\d+)", kernel.asm["amdgcn"]) for name in ("vgpr_count", "vgpr_spill_count"))
    registers, spills = (max(map(int, found)) for found in counts)
    return registers, spills


def right_factors_by_rows(text: str) -> int:
    """How many right factors a kernel reads from shared memory in which the inner dimension is the fastest."""
    orders = dict(re.findall(r"^(#shared\d*) = .*order = \[(\d), \d\]", text, re.MULTILINE))
    read = re.findall(r"ttg\.local_load .*<\d+x\d+xf32, (#shared\d*), .*#ttg\.dot_op<\{opIdx = 1,", text)
    return sum(orders[layout] == "0" for layout in read)


def read_hopper(kernel: Any) -> dict[str, Any]:
    """The same of a Gluon kernel, and how it waits and moves memory."""
    text = sass(kernel.asm["cubin"])
    outside = [kind for kind in kernel.src.signature.values() if str(kind).startswith("tensordesc")]
    return read(kernel)._asdict() | {
        "waits": [body.count("DEPBAR.LE gsb0, 0x0") for body in innermost_loops(text, r"\bHGMMA\b")],
        "tma": [kind for kind in ("UTMALDG", "UTMASTG", "UTMAREDG") if kind in text],
        # Triton compiles a descriptor inside a tuple, but cannot launch it
        "alone": len(outside) == len(kernel.metadata.tensordesc_meta),
        "barriers": barriers(kernel.asm["llir"]),
        "unwritten": unwritten(text),
    }


def barriers(llir: str) -> list[int]:
    """Where a kernel's barriers lie in shared memory, in bytes."""
    return sorted({int(at) for at in re.findall(r"mbarrier\.init[^\n]*global_smem, i\d+ (\d+)", llir)})


@lru_cache(1)
def sass(cubin: bytes) -> str:
    """Read by Triton's own tool, or by that of TILEWISE_CUOBJDUMP: the newest compiles for sm_70 but cannot read it.
    Without the instructions' bits, which are most of the text."""
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for tool in (own, os.environ.get("TILEWISE_CUOBJDUMP", own)):
            done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return re.sub(r"\s*/\* 0x\w+ \*/", "", done.stdout)
    raise RuntimeError(done.stderr)


LABEL = re.compile(r"\s*/\*([0-9a-f]{4,})\*/|(\.?L\w+):")
JUMP = re.compile(r"\b(?:BRA|BSSY)\b.*?0x([0-9a-f]+)|\bs_c?branch\S* (\.?L\w+)")
ENDS = re.compile(r"\*/\s+(?:BRA 0x|EXIT|RET)|\bs_branch\b|\bs_endpgm\b|\bs_setpc")
"""What never falls through to the next line."""


def innermost_loops(text: str, holding: str) -> list[str]:
    """The natural loops whose lines match `holding` and that have no other such loop inside."""
    kept = {blocks: body for blocks, body in natural_loops(text).items() if re.search(holding, body)}
    return [body for blocks, body in kept.items() if not any(other < blocks for other in kept)]


@lru_cache(1)
def natural_loops(text: str) -> dict[frozenset[int], str]:
    """The blocks of each loop, by their first lines, and its lines.

    A jump back closes a loop if nothing reaches it but through its target; so a wait that stands behind the loop and
    returns into its middle is part of the loop and not another loop.
    """
    lines = text.splitlines()
    place: dict[str, int] = {}
    for number, line in enumerate(lines):
        if label := LABEL.match(line):
            place.setdefault((label.group(1) or "").lstrip("0") or label.group(2) or "0", number)
    jumps = {}
    for number, line in enumerate(lines):
        if jump := JUMP.search(line):
            target = (jump.group(1) or "").lstrip("0") or jump.group(2)
            if target in place:
                jumps[number] = place[target]
    ends = {number for number, line in enumerate(lines) if ENDS.search(line)}
    starts = sorted({0, *jumps.values(), *(number + 1 for number in {*jumps, *ends})} - {len(lines)})
    after = dict(zip(starts, [*starts[1:], len(lines)], strict=True))  # a block, by its first line, and its end
    follow: dict[int, list[int]] = {}
    for start, end in after.items():
        follow[start] = [jumps[end - 1]] if end - 1 in jumps else []
        if end - 1 not in ends and end in after:
            follow[start].append(end)
    before = defaultdict(list)
    for start, nexts in follow.items():
        for following in nexts:
            before[following].append(start)
    loops = {}
    reachable = _reach([0], follow, None)
    for head in reachable - {0}:
        around = _reach([0], follow, head)
        if back := [start for start in before[head] if start in reachable - around]:
            blocks = frozenset({head, *_reach(back, before, head)})
            loops[blocks] = "\n".join("\n".join(lines[start : after[start]]) for start in sorted(blocks))
    return loops


def _reach(starts: list[int], follow: Any, avoiding: int | None) -> set[int]:
    seen, todo = set(), [start for start in starts if start != avoiding]
    while todo:
        if (block := todo.pop()) not in seen:
            seen.add(block)
            todo += [following for following in follow[block] if following != avoiding]
    return seen


# Lengths


LENGTHS = tuple(product((1, 2, 5), (16, 77, 1024, 4097), (80, 131, 4096)))
"""Batches, queries and keys. None is so short that it has separate tiles."""


def lengths(B: int, M: int, N: int) -> dict[str, dict[str, Any]]:
    """Options of calls that differ in nothing but lengths; with "layout", of packed ones."""
    ids, cu = (lambda length: meta(B, length, dtype=torch.int32)), meta(B + 1, dtype=torch.int32)
    return {
        "full": {},
        "causal": {"mask": tw.Causal()},
        "window": {"mask": tw.Window(M, N)},
        "padding": {"mask": tw.Padding(meta(B, dtype=torch.int64))},
        "documents": {"mask": tw.Documents(ids(M), ids(N))},
        "dense": {"mask": tw.Dense(meta(B, 4, M, N, dtype=torch.bool))},
        "bias": {"score": tw.Bias(meta(B, 4, M, N, dtype=torch.bfloat16)), "wanted": True},
        "varlen": {"layout": tw.Varlen(cu, cu, M, N), "mask": tw.Causal()},
    }


def keys(target: str) -> Iterator[dict[str, Any]]:
    """For every call and length, each kernel's cache key. Nothing is compiled: the compiler is replaced by a list."""
    use_target(target)
    seen: list[str] = []
    for D, (B, M, N) in product((64, 80), LENGTHS):
        for variant, options in lengths(B, M, N).items():
            packed = "layout" in options
            q, k = (meta(*((B * S,) if packed else (B, S)), 4, D, dtype=torch.bfloat16) for S in (M, N))
            found = defaultdict(list)
            for one in launches(target, q, k, k, **options):
                one.kernel._do_compile = lambda key, *_: seen.append(key)
                one.kernel.device_caches.clear()
                one.compile()
                found[one.kernel.fn.__name__].append(seen.pop())
            yield {"variant": variant, "D": D, "B": B, "M": M, "N": N, "keys": found}


if __name__ == "__main__":
    for line in {"compile": compile_all, "keys": keys}[sys.argv[1]](sys.argv[2]):
        print(json.dumps({"triton": triton.__version__, **line}), flush=True)
