"""Products of 32-bit integers that reach an address, and whether products and sums may fuse: one JSON line a kernel.

Run it in a separate process with TRITON_INTERPRET=0, as offline.py does, and stops each kernel after its first stage.
"""

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from triton import knobs

import tilewise as tw
from tilewise.call.check import describe_fake
from tilewise.call.operands import Operands
from tilewise.call.recipe import Recipe
from tilewise.merge.launch import merge_launch
from tilewise.triton.tiles import current
from tilewise.warm.precompile import launches as recorded
from tilewise.warm.warm import Call

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))
from addresses import products
from offline import described, launches, meta, use_target

from studies.accumulation import Accumulate
from studies.accumulation import launch as experiment

HERE = Path(__file__).parent
B, S, H, H_k, D = 2, 1024, 4, 2, 128

# what is compiled


def calls() -> dict[str, dict[str, Any]]:
    """Options of calls that together have every mask, score and layout, their tensors where no stride is 1."""
    ends, ids = meta(B + 1, dtype=torch.int32), meta(S, B, dtype=torch.int32).T
    real, seen = meta(S, B, dtype=torch.bool).T, meta(S, S, H, B, dtype=torch.bool).permute(3, 2, 1, 0)
    return {
        "full": {},
        "combined": {
            "mask": tw.Causal() & tw.Window(255, 3) & tw.Prefix(meta(B, dtype=torch.int64)),
            "score": [tw.SoftCap(30.0), tw.Alibi(meta(H, B, dtype=torch.float32).T)],
            "sink": meta(H, dtype=torch.float32),
            "dropout": 0.1,
        },
        "listed": {
            "mask": tw.Documents(ids, ids) & tw.Padding(real) & tw.Dense(seen),
            "score": tw.Bias(meta(S, S, H, B, dtype=torch.bfloat16).permute(3, 2, 1, 0)),
        },
        "spans": {"mask": tw.Spans(*(meta(S, B, dtype=torch.int32).T for _ in range(2)))},
        "placed": {
            "mask": tw.Prefix(meta(B, dtype=torch.int64)),
            "score": tw.Alibi(meta(H, B, dtype=torch.float32).T),
            "origin": tw.Origin(64, 128, 1, 8),
        },
        "placed dropout": {"mask": tw.Causal(), "dropout": 0.1, "origin": tw.Origin(64, 128, 1, 8)},
        "wide": {"mask": tw.Causal(), "out_dtype": torch.float32},
        "varlen": {"mask": tw.Causal() & tw.Padding(meta(B, dtype=torch.int32)), "layout": tw.Varlen(ends, ends, S, S)},
    }


def of_portable(options: dict[str, Any]) -> list[Any]:
    """The portable kernels' launches of a call."""
    shape = (B * S,) if "layout" in options else (B, S)
    q, k = (meta(*shape, heads, D, dtype=torch.bfloat16) for heads in (H, H_k))
    return launches("sm_90", q, k, k, **options, wanted=True)


def of_chunks() -> list[Any]:
    """The launches above head size 256, where a head has several chunks."""
    q, k = (meta(B, 1 << 16, heads, 320, dtype=torch.bfloat16) for heads in (H, H_k))
    return [one for one in launches("sm_90", q, k, k, mask=tw.Causal()) if "chunk" in one.kernel.fn.__name__]


def of_single() -> list[Any]:
    """The launches of heads whose score matrix is one tile."""
    q, k = (meta(B, 49, heads, 32, dtype=torch.bfloat16) for heads in (H, H))
    bias = tw.Bias(meta(49, 49, H, 1, dtype=torch.bfloat16).permute(3, 2, 1, 0))
    return launches("sm_90", q, k, k, score=bias, backend="triton", wanted=True)


def of_sink(backend: str) -> Iterator[Any]:
    """The launches for the gradient of a sink, of a batch and of packed sequences."""
    ends = meta(B + 1, dtype=torch.int32)
    for rows, options in (((B, S), {}), ((B * S,), {"layout": tw.Varlen(ends, ends, S, S)})):
        q = meta(*rows, H, D, dtype=torch.bfloat16)
        p, _ = described("sm_90", q, q, q, sink=meta(H, dtype=torch.float32), backend=backend, **options)
        made = recorded(Call(p, tuple(t.dtype.is_floating_point for t in p.extra)))
        yield from (one for one in made if "sink" in one.kernel.fn.__name__)


def of_hopper(options: dict[str, Any]) -> Iterator[Any]:
    """Hopper's launches: of the same calls and of further kinds, in bf16 and in fp32."""
    half, full = (module(HERE.parent / "hopper" / name) for name in ("offline.py", "offline_fp32_backward.py"))
    ordered, shared = {"mask": tw.Causal(), "deterministic": True}, {"mask": tw.Causal(), "B": 1, "H": 16, "H_k": 1}
    separate = options["listed"] | {"backend": None}  # a kernel of its own for the bias's gradient
    for given in (*options.values(), ordered, shared, separate):
        yield from half.launches(D, given)
    for given in ({}, {"mask": options["listed"]["mask"]}, options["varlen"]):
        yield from half.launches(D, {**given, "precision": "fp16x3"})
    for call in ("full", "ordered", "varlen"):
        yield from full.launches(D, "fp16x3", call)


def module(path: Path) -> Any:
    """A file's functions; two are called offline.py."""
    spec = spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec
    assert spec.loader
    spec.loader.exec_module(made := module_from_spec(spec))
    return made


def of_experiment() -> list[Any]:
    """The launch of studies/accumulation."""
    q = meta(B, S, H, 64, dtype=torch.float16)
    x = Operands(q, q, q, ())
    p = describe_fake(x, Recipe(), (0, 0), "sm_90")
    return experiment.launches(p, x, torch.empty_like(q), Accumulate(), current(p).forward)


def of_merge() -> Iterator[Any]:
    """Launches that merge two parts into sums, and into a new result."""
    for kind in (torch.float32, torch.bfloat16):
        part = meta(B, S, H, D, dtype=kind), meta(B, H, S, dtype=torch.float32)
        into = meta(B, 2 * S, H, D, dtype=torch.float32)[:, :S], meta(B, H, 2 * S, dtype=torch.float32)[..., :S]
        yield merge_launch(*into, [into, part], {})
        yield merge_launch(*part, [part, part], {})


# the text of a kernel


class Stop(Exception):  # noqa: N818, it carries a result
    """A kernel's text after its first stage, and its options."""


def first_stage(launch: Any, seen: set[Any]) -> tuple[str, Any] | None:
    """A kernel's Triton IR, or its Triton GPU IR if it is written in Gluon, and what it is compiled with; None if its
    key, by which Triton tells kernels apart, is among those seen."""
    jit = launch.kernel
    compile_it = jit._do_compile

    def once(key: str, *rest: Any) -> Any:
        if (jit, key) in seen:
            raise Stop(None)
        seen.add((jit, key))
        return compile_it(key, *rest)

    def after_first(_: Any, stages: dict[str, Any], options: Any, *__: Any) -> None:
        name, first = next(iter(stages.items()))

        def stop(module: Any, metadata: Any) -> None:
            raise Stop((str(first(module, metadata)), options))

        stages[name] = stop

    knobs.runtime.add_stages_inspection_hook = after_first
    knobs.compilation.always_compile = True
    jit._do_compile = once
    try:
        launch.compile()
    except Stop as stopped:
        return stopped.args[0]
    finally:
        del jit._do_compile
    raise AssertionError("the first stage was not run")


def main() -> Iterator[dict[str, Any]]:
    """Every kernel of every call."""
    use_target("sm_90")
    made = [("experiment", one) for one in of_experiment()]
    made += [("portable", one) for given in calls().values() for one in of_portable(given)]
    made += [("portable", one) for one in (*of_single(), *of_chunks())]
    made += [("merge", one) for one in of_merge()]
    made += [("hopper", one) for one in of_hopper(calls())]
    made += [
        (backend, one) for backend, name in (("portable", "triton"), ("hopper", "hopper")) for one in of_sink(name)
    ]
    seen: set[Any] = set()
    for backend, one in made:
        if (found := first_stage(one, seen)) is not None:
            text, options = found
            row = {"products": sorted(set(products(text))), "fused": options.enable_fp_fusion}
            yield {"kernel": f"{backend} {one.kernel.fn.__name__}"} | row


if __name__ == "__main__":
    for row in main():
        print(json.dumps(row), flush=True)
