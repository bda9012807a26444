"""Compiles emitted device functions for sm_90 without a GPU: one JSON line a function, with its number of instructions.

Run it in a separate process with TRITON_INTERPRET=0:

    python tests/program/emit_compiled.py triton      all functions of functions.py in a Triton kernel
    python tests/program/emit_compiled.py gluon       the same in a Gluon kernel, with Hopper's forms
    python tests/program/emit_compiled.py counts      SoftCap, Alibi and Bias
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import tilewise as tw
from tilewise.hopper.parts import scores as of_hopper
from tilewise.hopper.parts.threads import as_tile, by_thread, positions
from tilewise.host.emit import Form
from tilewise.program import Traced, trace
from tilewise.tile.masks import visible
from tilewise.tile.scores import Entries, apply_scores, scores_backward
from tilewise.warm.cross_compile import use_target

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "triton")]
from known import compile_new, known
from offline import innermost_loops, registers_and_spills, sass
from program.emitted import mask_part, score_part
from program.functions import M, N, examples

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/", re.MULTILINE)
CAP = 30.0
FIRST = Form("first")


@triton.jit(do_not_specialize=["mask", "scores", "M", "N", "H"])
def triton_tiles(S, dS, T, out, mask, scores, M, N, H, GRAD: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr):
    """Apply a mask and scores to a row of tiles, as the portable kernels do."""
    matrix = tl.program_id(1)
    b, h = matrix // H, matrix % H
    i0, i, j = tl.program_id(0) * B_R, tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    start = matrix.to(tl.int64) * M * N
    for x in range(tl.cdiv(N, B_C)):
        j0 = x * B_C
        at = start + (i0 + i) * N + j0 + j
        real = (i0 + i < M) & (j0 + j < N)
        s = tl.load(S + at, mask=real, other=0.0)
        shown = visible(mask, b, h, i0 + i + (N - M), j0 + j) & real
        place = Entries(b, h, i0 + i + (N - M), 0, j0, j)
        t = apply_scores(scores, s, place, len(scores))
        if GRAD:
            g = tl.load(dS + at, mask=real, other=0.0)
            tl.store(out + at, scores_backward(scores, g, s, t, place, 0), mask=shown)
        tl.store(T + at, t, mask=shown)


@gluon.jit(do_not_specialize=["mask", "scores", "M", "N", "H"])
def gluon_tiles(S, dS, T, out, mask, scores, M, N, H, GRAD: gl.constexpr, B_R: gl.constexpr, B_C: gl.constexpr):
    """Do the same as Hopper's kernels do, whose backward has the logits after scores from P."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_C, 16])
    matrix = gl.program_id(1)
    b, h = matrix // H, matrix % H
    i0 = gl.program_id(0) * B_R
    i = gl.arange(0, B_R, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, B_C, gl.SliceLayout(0, layout))[None, :]
    start = matrix.to(gl.int64) * M * N
    for x in range((N + B_C - 1) // B_C):
        j0 = x * B_C
        at = start + (i0 + i) * N + j0 + j
        real = (i0 + i < M) & (j0 + j < N)
        s = gl.load(S + at, mask=real, other=0.0)
        shown = visible(mask, b, h, i0 + i + (N - M), j0 + j) & real
        row, first, column = positions(s)
        place = Entries(b, h, i0 + (N - M) + row, 0, j0 + first, column)
        if GRAD:
            g, t = gl.load(dS + at, mask=real, other=0.0), gl.load(T + at, mask=real, other=0.0)
            found = scores_backward(scores, by_thread(g), by_thread(s), by_thread(t), place, 0)
        else:
            found = apply_scores(scores, by_thread(s), place, len(scores))
        gl.store(out + at, as_tile(found, s), mask=shown)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(kernel: Any, mask: Any, scores: Any, grad: bool) -> dict[str, Any]:
    """What a kernel became: instructions of its loop, registers, spilled bytes; of what is known, nothing."""
    S = meta(1 << 20)
    kernel.device_caches.clear()
    digest, made = compile_new(
        lambda: kernel.warmup(S, S, S, S, mask, scores, 1000, 1040, 4, GRAD=grad, B_R=64, B_C=32, grid=(1,)), DIGESTS
    )
    if made is None:
        return {"ir": digest, "known": True}
    registers, spilled = registers_and_spills(made)
    (loop,) = innermost_loops(sass(made.asm["cubin"]), r"\bSTG\b")
    return {"ir": digest, "instructions": len(INSTRUCTION.findall(loop)), "registers": registers, "spilled": spilled}


def on_meta(t: Any) -> Any:
    """The captured tensor without numbers."""
    return t.detach().to("meta") if isinstance(t, Tensor) else t


def moved(part: Any) -> Any:
    return part._replace(captured=tuple([on_meta(t) for t in part.captured]))


def rows(kernel: Any, saturated: Any) -> Iterator[dict[str, Any]]:
    """Every function of functions.py."""
    for name, example in examples().items():
        found = trace(example.fn, example.what, example.tensors)
        form, place = Form(rows="first"), (N - M,)
        if example.what == "mask":
            yield {"name": name, **compiled(kernel, (moved(mask_part(found, form, place)),), (), False)}
            continue
        part = moved(score_part(found, form, place, 0.125, saturated))
        for grad in (False, True):
            yield {"name": name, "grad": grad, **compiled(kernel, (), (part,), grad)}
    yield from more(kernel, saturated)


def more(kernel: Any, saturated: Any) -> Iterator[dict[str, Any]]:
    """Several masks and scores in one kernel, other forms, and scores that do not read s."""
    found = {name: trace(example.fn, example.what, example.tensors) for name, example in examples().items()}
    first = Form(rows="first")
    masks = [moved(mask_part(found[name], first, (N - M,))) for name in ("causal", "window", "document")]
    scores = [
        moved(score_part(found[name], first, (N - M,), 0.125, saturated))
        for name in ("softcap", "alibi", "alibi_fixed")
    ]
    ends = torch.zeros(3, dtype=torch.int32)
    packed, wide = (
        moved(mask_part(found["document"], Form("first", packed=True), (ends, ends))),
        first._replace(wide=True, narrow=True),
    )
    for grad in (False, True):
        yield {"name": "several", **compiled(kernel, tuple(masks), tuple(scores), grad)}
        last = moved(score_part(found["relative"], Form(past=True), (), 0.125, saturated))
        yield {"name": "last and packed", **compiled(kernel, (packed,), (last,), grad)}
        for name in ("natten", "stripes"):
            yield {
                "name": f"{name}, wide",
                **compiled(kernel, (moved(mask_part(found[name], wide, (N - M,))),), (), grad),
            }
        for name in ("swin", "bits", "forgetting", "narrow_types"):
            part = moved(score_part(found[name], wide, (N - M,), 0.125, saturated))
            yield {"name": f"{name}, wide", **compiled(kernel, (), (part,), grad)}
        t = torch.zeros(9)
        for fn, captured in (
            (lambda s, b, h, i, j: 0.5, ()),
            (lambda s, b, h, i, j: h * 0.5, ()),
            (lambda s, b, h, i, j: (j - 4) // 3, ()),
            (lambda s, b, h, i, j: torch.tanh(i / 4), ()),
            (lambda s, b, h, i, j, t: t[j] * t[-1] + t[0], (t,)),
            (lambda s, b, h, i, j, n, m, x, no: torch.where(no, s, (i - j) // n % m * x) + abs(n), (1, 16, 1.0, True)),
        ):
            part = moved(score_part(trace(fn, "score", captured), first, (N - M,), 0.125, saturated))
            yield {"name": "without s", **compiled(kernel, (), (part,), grad)}


def counts() -> Iterator[dict[str, Any]]:
    """The rules of our scores; `nothing` is a kernel without scores."""
    slopes, bias = torch.zeros(4), torch.zeros(2, 4, 1000, 1040, dtype=torch.bfloat16)
    alibi, bias_of = tw.Alibi(slopes).traced, tw.Bias(bias).traced
    parts = {
        "softcap": (tw.SoftCap(CAP).traced, Form(), ()),
        "alibi": (alibi, Form(), ()),
        "alibi_past": (alibi, Form(past=True), ()),
        "bias": (bias_of, FIRST, (40,)),
    }
    for back, kernel in {"triton": triton_tiles, "gluon": gluon_tiles}.items():
        saturated = of_hopper.saturated if back == "gluon" else None
        yield {"name": "nothing", "kernel": back, **compiled(kernel, (), (), False)}
        for name, (found, form, place) in parts.items():
            part = moved(score_part(Traced(*found[:3]), form, place, 0.125, saturated))
            for grad in (False, True):
                yield {"name": name, "kernel": back, "grad": grad, **compiled(kernel, (), (part,), grad)}


if __name__ == "__main__":
    use_target("sm_90")
    DIGESTS = frozenset() if sys.argv[1] == "counts" else known(f"program/emit_compiled.py {sys.argv[1]}")
    todo = {
        "triton": lambda: rows(triton_tiles, None), "gluon": lambda: rows(gluon_tiles, of_hopper.saturated),
        "counts": counts,
    }  # fmt: skip
    for row in todo[sys.argv[1]]():
        print(json.dumps({"triton": triton.__version__, **row}), flush=True)
