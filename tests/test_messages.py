"""Errors have one form: `NAME must ALLOWED, got WHAT; DO THIS`. CONTRIBUTING.md says it, and these tests hold it.

What no value of an argument could mend, such as Unsupported or RuntimeError, reads `WHAT; DO THIS`.
"""

import ast
import re
from functools import partial
from pathlib import Path

import pytest
import test_attention_backward
import test_errors
import test_layout
import test_mask
import test_merge
import test_origin
import test_rotary
import test_score
import torch

import tilewise as tw
from tilewise import compat
from tilewise.compat import flash_attn, flash_attn_interface, sdpa
from tilewise.compat.flash_attn import cute
from tilewise.compat.flash_attn.layers import rotary
from tilewise.compat.flash_attn.modules import mha

SOURCE = Path(__file__).parents[1] / "src" / "tilewise"
REMEDY = (
    "add|call|change|choose|clamp|convert|detach|did you mean|expand|gather|give|import|install|leave|make|move|name|"
    "pad|pass|project|remove|rename|repeat|reshape|rotate|run|set|split|stack|use|write"
)
FORM = re.compile(rf"[^;]+ must .+, got .+; ({REMEDY}) .+", re.DOTALL)
SHORT_FORM = re.compile(rf"[^;]+; ({REMEDY}) .+", re.DOTALL)
FORMS = {
    **dict.fromkeys(("TypeError", "ValueError"), FORM),
    **dict.fromkeys(
        ("Unsupported", "RuntimeError", "AttributeError", "ImportError", "OldTriton", "OSError", "PermissionError"),
        SHORT_FORM,
    ),
    "refuse": re.compile(".*", re.DOTALL),  # program/, whose tests hold what it says
    "ArgumentTypeError": re.compile("must .+, got .+"),  # the rest is argparse's and cli/parser.py's
    **dict.fromkeys(("AssertionError", "NotImplementedError"), re.compile(".*")),  # not for users
}
MADE_ELSEWHERE = ("bench/measure.py", "cli/shadow.py", "host/tables.py", "call/dispatch.py", "values/value.py",
    "values/function.py", "program/trace.py", "warm/warm.py",
)  # fmt: skip
"""Files that also raise with text from a process, a library, a constant or a function."""


def text_of(node: ast.expr) -> str | None:
    """Return a message with `use …` in place of what is filled in; None if it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "use …" for part in node.values)
    return None


def raised():
    """Yield file, line, class and message of every raise in the package that makes an exception."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rsplit(".", 1)[-1]
                text = text_of(node.exc.args[0]) if node.exc.args else ""
                yield file.relative_to(SOURCE).as_posix(), node.lineno, name, text


def test_every_message_has_the_form():
    wrong = []
    for file, line, name, text in raised():
        known = file in MADE_ELSEWHERE if text is None else FORMS[name].fullmatch(text)
        if not known:
            wrong.append(f"{file}:{line} {name}: {text}")
    assert wrong == []


def meta(*shape):
    return torch.zeros(shape, device="meta")


def twice(q):
    (grad,) = torch.autograd.grad(tw.attention(q, q, q).sum(), q, create_graph=True)
    torch.autograd.grad(grad.sum(), q)


def installed_twice():
    with sdpa.use(devices=("cpu",)):
        sdpa.install(devices=("cpu",), always=True)


def backward_through_pages():
    q, table = X.clone().requires_grad_(), torch.zeros(2, 1, dtype=torch.int32)
    cute.flash_attn_varlen_func(q, X, X, page_table=table)[0].sum().backward()


X = torch.zeros(2, 5, 4, 8)
CU = torch.tensor([0, 5], dtype=torch.int32)
MORE = {
    "explain without a chip": lambda: tw.explain(*[meta(2, 5, 4, 8)] * 3),
    "qkv no tensor": lambda: tw.attention_qkvpacked([1.0]),
    "qkv of two parts": lambda: tw.attention_qkvpacked(torch.zeros(2, 5, 2, 4, 8)),
    "qkv packed": lambda: tw.attention_qkvpacked(torch.zeros(5, 3, 4, 8)),
    "kv of three parts": lambda: flash_attn.flash_attn_kvpacked_func(X, torch.zeros(2, 5, 3, 4, 8)),
    "pages": lambda: flash_attn.flash_attn_varlen_func(X[0], X[0], X[0], CU, CU, 5, 5, block_table=CU),
    "heads of a packed projection": lambda: flash_attn_interface.flash_attn_qkvpacked_func(X, num_heads_q=3),
    "a descale": lambda: flash_attn_interface.flash_attn_func(*[X.to(torch.float8_e4m3fn)] * 3, q_descale=CU.float()),
    "lengths in use": lambda: cute.flash_attn_varlen_func(X, X, X, seqused_q=CU[:1]),
    "a negative chunk": lambda: flash_attn_interface.flash_attn_func(X, X, X, attention_chunk=-4),
    "a backward through pages": backward_through_pages,
    "a negative side": lambda: cute.flash_attn_func(X, X, X, window_size=(-1, 0)),
    "a layer's sizes": lambda: mha.MHA(12, 5),
    "a layer with ALiBi": lambda: mha.MHA(12, 4, use_alibi=True),
    "a layer that generates": lambda: mha.MHA(12, 4)(X[..., 0, 0], inference_params=CU),
    "a package that is not known": lambda: compat.install("torch"),
    "a cache": lambda: flash_attn.flash_attn_with_kvcache(X, X, X, k=X),
    "rotary kv": lambda: rotary.apply_rotary_emb_kv_(X, X, X),
    "rotary qkv": lambda: rotary.apply_rotary_emb_qkv_(X[0], X, X),
    "rotary heads": lambda: rotary.apply_rotary_emb_qkv_(X, X, X, num_heads_q=3),
    "rotary offset": lambda: rotary.RotaryEmbedding(8)(X, seqlen_offset=CU),
    "no back end": lambda: tw.attention(*[X.double()] * 3, backend="triton"),
    "double backward": lambda: twice(torch.zeros(2, 5, 4, 8, requires_grad=True)),
    "options of the backward": lambda: tw.attention_backward(X, X, X, X, X, X, return_lse=True),
    "sdpa on no device": lambda: sdpa.install(devices=()),
    "sdpa on a word": lambda: sdpa.install(devices="cuda"),
    "sdpa on another device": lambda: sdpa.install(devices=("tpu",)),
    "sdpa, always 1": lambda: sdpa.install(always=1),
    "sdpa installed twice": installed_twice,
    "forward mode": lambda: torch.func.jvp(lambda q: tw.attention(q, X, X), (X,), (X,)),
}


def cases(test):
    """Return the rows of a test's parametrize."""
    return next(mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")


def rows_of_rotary(change):
    return lambda: tw.rotary(**{"x": test_rotary.X, "cos": test_rotary.COS, "sin": test_rotary.COS, **change})


def bad_calls():
    """Yield a name and a call for each public error, most from the tests of single messages."""
    yield from MORE.items()
    yield from ((name, attempt) for name, (attempt, *_) in test_errors.WRONG.items())
    yield from ((name, attempt) for name, (attempt, _) in test_origin.WRONG.items())
    yield from (
        (f"attention_backward: {name}", partial(test_attention_backward.attempt, name))
        for name in test_attention_backward.WRONG
    )
    for module in (test_layout, test_mask, test_score):
        for make, _, words in cases(module.test_a_wrong_value_says_what_is_wrong):
            yield " ".join(words), make
    for parts, _, words in cases(test_merge.test_a_wrong_part_says_what_is_wrong):
        yield " ".join(("merge", *words)), partial(tw.merge, parts)
    for change, _, message in test_rotary.WRONG:
        yield f"rotary: {message}", rows_of_rotary(change)


CALLS = dict(bad_calls())


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_answered_in_the_form(name):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        CALLS[name]()
    form = SHORT_FORM if type(caught.value) in (tw.Unsupported, RuntimeError) else FORM
    assert form.fullmatch(str(caught.value)), caught.value
