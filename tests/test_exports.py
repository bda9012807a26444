"""The names that users type: exact and sorted."""

import inspect

import tilewise as tw

NAMES = [
    "Alibi",
    "Bias",
    "Blocks",
    "Cached",
    "Calls",
    "Causal",
    "Dense",
    "Documents",
    "EightBits",
    "Explanation",
    "Full",
    "Mask",
    "Origin",
    "Padding",
    "Prefix",
    "Quantized",
    "Score",
    "SoftCap",
    "Spans",
    "Unsupported",
    "Varlen",
    "Warmed",
    "Window",
    "append_",
    "attention",
    "attention_backward",
    "attention_qkvpacked",
    "copy_pages_",
    "count_calls",
    "explain",
    "listed",
    "merge",
    "rotary",
    "rotary_qk",
    "use_bundle",
    "warm",
]


def test_all_is_exact_and_sorted():
    assert tw.__all__ == NAMES


def test_every_name_is_there_and_says_what_it_is():
    for name in NAMES:
        assert inspect.getdoc(getattr(tw, name)), name


def test_attention_has_the_arguments_of_the_design():
    parameters = inspect.signature(tw.attention).parameters
    assert list(parameters) == [
        *("q", "k", "v", "mask", "score", "scale", "sink", "dropout", "seed", "layout"),
        *("precision", "deterministic", "return_lse", "backend", "out_dtype", "origin"),
    ]
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name not in "qkv")
    defaults = {name: p.default for name, p in parameters.items() if name not in ("q", "k", "v", "mask")}
    assert defaults == {
        "score": (),
        "scale": None,
        "sink": None,
        "dropout": 0.0,
        "seed": None,
        "layout": None,
        "precision": None,
        "deterministic": False,
        "return_lse": False,
        "backend": None,
        "out_dtype": None,
        "origin": None,
    }
    assert parameters["mask"].default.parts == ()


def test_signatures_in_full_say_what_is_returned():
    assert inspect.signature(tw.explain).return_annotation is tw.Explanation
    assert inspect.signature(tw.warm).return_annotation is tw.Warmed
    assert {"mask", "device", "more", "return_lse"} <= set(inspect.signature(tw.warm).parameters)


def test_the_version_is_a_string_of_numbers():
    assert all(part.isdigit() for part in tw.__version__.split(".")[:2])
