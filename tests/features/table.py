"""Every feature of `attention`, with its values: masks, scores, layouts and precisions are those that tilewise exports.

A value sets fields of a conformance Case, or of a `Setting`, and says by which words an error names it.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from conformance.cases import (
    STRIDES,
    Draw,
    alibi,
    bf16,
    bias,
    blocks,
    both,
    causal,
    dense,
    documents,
    fp16,
    fp32,
    fp64,
    padding,
    padding_bool,
    padding_range,
    prefix,
    softcap,
    spans,
    spans_by_head,
    window,
)

import tilewise as tw
from tilewise.values import value
from tilewise.values.layout import Layout
from tilewise.values.products import EIGHT_BITS, PRECISIONS

H = 2
"""Query heads, but for GQA and MQA."""
NUMBER = 5
"""What a class without builders gets for a number."""


@dataclass(frozen=True)
class Value:
    """One value of a feature."""

    sets: dict[str, Any]
    words: str = ""
    """A pattern: how an error names it; "" where only the feature's name is one."""


def exported(kind: type) -> list[type]:
    """Return the classes of a kind that users import, without that class itself."""
    found = [getattr(tw, name) for name in tw.__all__]
    return [one for one in found if inspect.isclass(one) and issubclass(one, kind) and one is not kind]


def by_convention(kind: type[value.Value]) -> Callable[[Draw], Any]:
    """Return a builder for a class that has none below: numbers are 5, tensors have the shapes that it states, and the
    first type that it takes."""

    def build(draw: Draw) -> Any:
        drawn = dict(zip(kind.captures, kind.shapes, strict=True))
        for of_type in (draw.bools, lambda *shape: draw.integers(NUMBER, *shape), draw.normal):
            made = {name: of_type(*draw.sizes(shape)) for name, shape in drawn.items()}
            try:
                return kind(**{name: made.get(name, NUMBER) for name in kind.__match_args__})
            except (TypeError, ValueError):
                continue
        raise AssertionError(f"tests/features/table.py has no builder for {kind.__name__}; add one to MASKS or SCORES")

    return build


MASKS: dict[type, dict[str, Callable[[Draw], tw.Mask]]] = {
    tw.Full: {"full": both()},
    tw.Causal: {"causal": causal},
    tw.Window: {"window": window(7, 4)},
    tw.Prefix: {"prefix": prefix},
    tw.Padding: {"padding": padding, "padding on both sides": padding_range, "padding by key": padding_bool},
    tw.Documents: {"documents": documents},
    tw.Dense: {"dense": dense()},
    tw.Spans: {"spans": spans, "spans by head": spans_by_head},
    tw.Blocks: {"blocks": blocks},
}
"""Builders of each class of mask that tilewise exports."""
SCORES: dict[type, dict[str, Callable[[Draw], tw.Score]]] = {
    tw.SoftCap: {"softcap": softcap()},
    tw.Alibi: {"alibi": alibi(), "alibi by batch": alibi("BH")},
    tw.Bias: {"bias": bias("HMN"), "bias of keys": bias("B11N")},
}
LAYOUTS: dict[type, dict[str, str]] = {
    tw.Varlen: {"varlen": "Varlen|packed|layout", "varlen, rows of none": "Varlen|packed|layout"},
    tw.Cached: {"cached": "Cached|cache|layout", "cached in pages": "Cached|cache|layout"},
}
"""Names of each class's layouts, and the words of their errors; `calls.py` builds them."""


def of_class(builders: dict[type, dict[str, Any]], kind: type) -> Iterator[tuple[str, Any, type]]:
    """Yield name, builder and class of everything of a kind that is exported."""
    for one in exported(kind):
        for name, build in builders.get(one, {one.__name__: by_convention(one)}).items():
            yield name, build, one


def masks() -> dict[str, Value]:
    found = {name: Value({"mask": build}, kind.__name__) for name, build, kind in of_class(MASKS, tw.Mask)}
    first = {"full": found.pop("full")}
    return {**first, **found, "causal & padding": Value({"mask": both(causal, padding)}, "Causal|Padding")}


def scores() -> dict[str, Value]:
    found = {name: Value({"score": (build,)}, kind.__name__) for name, build, kind in of_class(SCORES, tw.Score)}
    three = softcap(3.0), bias("HMN"), alibi()
    return {"none": Value({}), **found, "softcap, bias, alibi": Value({"score": three}, "SoftCap|Bias|Alibi")}


def layouts() -> dict[str, Value]:
    lacking = [kind.__name__ for kind in exported(Layout) if kind not in LAYOUTS]
    assert not lacking, f"tests/features/table.py has no builder for the layout {lacking[0]}; add one to LAYOUTS"
    found = {name: words for kinds in LAYOUTS.values() for name, words in kinds.items()}
    return {"padded": Value({}), **{name: Value({"layout": name}, words) for name, words in found.items()}}


def types() -> dict[str, Value]:
    """Types of q, k and v, with the precisions that go with them."""
    of_fp32 = {f"fp32 {name}": Value({"precision": name}, f"precision.*{name}") for name in PRECISIONS}
    of_16 = {
        f"{word} {name}": Value({"dtype": dtype, "precision": name}, f"precision|{name}|8-bit")
        for name, (word, dtype) in zip(EIGHT_BITS, (("bf16", bf16), ("fp16", fp16)), strict=True)
    }
    eight = {"dtype": bf16}
    return {
        "fp32": Value({}, "fp32|float32"),
        "bf16": Value({"dtype": bf16}, "bf16|bfloat16"),
        "fp16": Value({"dtype": fp16}, "fp16|float16"),
        "fp64": Value({"dtype": fp64}, "fp64|float64"),
        **of_fp32,
        **of_16,
        "int8 of a layer": Value({**eight, "precision": "int8", "told": "mean"}, "EightBits|precision|int8"),
        "fp8 with rotary": Value({**eight, "precision": "fp8", "told": "rotary"}, "EightBits|precision|fp8"),
        "e4m3": Value({**eight, "e4m3": True}, "Quantized|e4m3"),
        "e4m3 fp8": Value({**eight, "e4m3": True, "precision": "fp8"}, "Quantized|e4m3|precision|fp8"),
    }


GRADIENT = "gradient|requires_grad|backward|inference"
"""How an error names that one is wanted."""
FEATURES: dict[str, dict[str, Value]] = {
    "mask": masks(),
    "score": scores(),
    "layout": layouts(),
    "type": types(),
    "sink": {
        "none": Value({}),
        "fp32": Value({"sink": fp32}, "sink"),
        "q's type": Value({"sink": "q's type"}, "sink"),
    },
    "dropout": {
        "none": Value({}),
        "0.2": Value({"dropout": 0.2, "seed": "number"}, "dropout"),
        "0.2, a tensor's seed": Value({"dropout": 0.2, "seed": "tensor"}, "dropout"),
    },
    "scale": {"none": Value({}), "0.3": Value({"scale": 0.3}, "scale")},
    "heads": {
        "MHA": Value({}),
        "GQA": Value({"H": 4, "H_k": 2}, "heads"),
        "MQA": Value({"H": 3, "H_k": 1}, "heads"),
    },
    "D_v": {"D": Value({}), "40": Value({"D_v": 40}, "head size"), "64": Value({"D_v": 64}, "head size")},
    "out_dtype": {"none": Value({}), "fp32": Value({"out_dtype": fp32}, "out_dtype")},
    "returns": {
        "o": Value({"loss": "o"}),
        "o and lse": Value({"loss": "both"}, "lse"),
        "lse alone": Value({"loss": "lse"}, "lse"),
    },
    "origin": {
        "none": Value({}),
        "rows and keys": Value({"origin": (16, 64, 0, 0)}, "origin"),
        "heads and batch": Value({"origin": (0, 0, 1, 1)}, "origin"),
    },
    "deterministic": {"no": Value({}), "yes": Value({"deterministic": True}, "deterministic")},
    "stored": {"apart": Value({}), "as qkv": Value({"qkv": True}, "qkv")},
    "strides": {name: Value({"strides": name}, "stride") for name in STRIDES},
    "sizes": {
        "33 x 33": Value({"sizes": (2, 33, 33)}),
        "17 x 33": Value({"sizes": (2, 17, 33)}),
        "33 x 17": Value({"sizes": (2, 33, 17)}),
        "one query": Value({"sizes": (2, 1, 33)}),
        "no batch": Value({"sizes": (0, 33, 33)}),
        "no queries": Value({"sizes": (2, 0, 33)}),
        "no keys": Value({"sizes": (2, 33, 0)}),
    },
    "gradient": {
        name: Value({"gradient": name}, GRADIENT)
        for name in ("no_grad", "inference_mode", "autograd", "func.grad", "attention_backward")
    },
    "mode": {
        name: Value({"mode": name}, name)
        for name in ("eager", "vmap", "compile", "autocast", "deepcopy", "pickle", "save and load", "listed")
    },
}
"""Each feature's values; the first one is the default."""
TABLE = {feature: tuple(values) for feature, values in FEATURES.items()}


def pair(one: str, other: str) -> frozenset[tuple[str, str]]:
    """Return the pair of two values, each written "feature: value"."""
    (a, b), (c, d) = (text.split(": ", 1) for text in (one, other))
    assert b in TABLE[a], one
    assert d in TABLE[c], other
    return frozenset(((a, b), (c, d)))


UNSAYABLE = {
    pair("stored: as qkv", other)
    for other in (
        *(f"heads: {name}" for name in ("GQA", "MQA")),
        *(f"D_v: {name}" for name in ("40", "64")),
        *(f"sizes: {name}" for name in ("17 x 33", "33 x 17", "one query", "no queries", "no keys")),
    )
} | {pair("layout: varlen, rows of none", f"strides: {name}") for name in ("one_head", "one_batch", "one_number")}
"""Pairs that no call can state: one tensor qkv has one length, one number of heads and one head size; and rows that
share memory with others cannot be NaN alone."""
