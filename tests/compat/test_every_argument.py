"""Every argument of another library's function is used or refused by name; functions and arguments join by themselves.

A case calls a function twice: with an argument at its neutral value, and at one that must matter. The second call must
give another result, write to another tensor, or raise an error that names the argument.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import NoneType
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat import diffusers, flex, sdpa, torch_flash
from tilewise.compat import flash_attn_interface as three
from tilewise.compat.flash_attn import bert_padding, cute, flash_attn_gpu, flash_attn_interface
from tilewise.compat.flash_attn.layers import rotary
from tilewise.compat.flash_attn.modules import mha
from tilewise.compat.transformers import layer as transformers

MODULES = bert_padding, cute, flash_attn_gpu, flash_attn_interface, three, mha, rotary
B, M, N, H, H_K, D, NEW, EMBED = 2, 5, 8, 4, 2, 8, 2, 16

KERNELS = "it schedules kernels"
BY_ROW = "rows are merged one by one, of whatever sequence they are"
BOUND = "it bounds lengths that other arguments hold"
HINTS = {
    **dict.fromkeys(
        ("disable_scheduler_metadata", "min_seqlen_k", "num_splits", "pack_gqa", "scheduler_metadata"), KERNELS
    ),
    **dict.fromkeys(("gather_bwd_recompute_p", "gather_bwd_token_chunk", "seqlen_k_per_split", "sm_margin"), KERNELS),
    **dict.fromkeys(("max_k", "max_q", "max_seqlen", "max_seqlen_k", "max_seqlen_q"), BOUND),
    "attend.enable_gqa": "heads are shared wherever k and v have fewer",
    "checkpointing": "it computes the same again in the backward",
    "deterministic": "it orders sums of gradients, which a CPU always does",
    "fused_bias_fc": KERNELS,
    "layer_idx": "it names the layer's keys in inference_params, which are refused",
    "RotaryEmbedding.device": "tables are on the device of what is rotated",
    **dict.fromkeys([f"flash_attn_combine.{n}" for n in ("cu_seqlens", "seqused", "virtual_batch_idx")], BY_ROW),
    "kernel_options": KERNELS,
    "get_scheduler_metadata": "its result is scheduler_metadata",
    "use_flash_attn": "its layers compute the same, and take more arguments",
    "zero_tensors": "every entry of a result is written",
}
"""Arguments that by their nature change no result, and why; function.argument, or a function, for these alone."""


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- operands: what an argument without a default is, by its name

PADDED = {
    "q": draw(B, M, H, D),
    "k": draw(B, N, H_K, D),
    "v": draw(B, N, H_K, D) + 1,
    "kv": draw(B, N, 2, H_K, D),
    "qkv": draw(B, N, 3, H, D),
    "dout": draw(B, M, H, D) + 2,
    **dict.fromkeys(("k_cache", "kcache"), draw(B, N, H_K, D)),
    **dict.fromkeys(("v_cache", "vcache"), draw(B, N, H_K, D) + 1),
    "x": draw(B, M, H, D),
    "cos": draw(2 * N, D // 2),
    "sin": draw(2 * N, D // 2) + 1,
    "out_partial": draw(3, B, M, H, D),
    "lse_partial": draw(3, B, M, H),
    "input": draw(6, D),
    "values": draw(3, D),
    "indices": torch.tensor([4, 0, 2]),
    "first_axis_dim": 6,
    "hidden_states": draw(B, M, D),
    "attention_mask": torch.arange(M) < torch.tensor([[2], [4]]),
    "attention_mask_in_length": torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0]]),
    "batch": 2,
    "seqlen": 3,
    "tensor": draw(2, 6),
    "pattern": "a b -> b a",
    "dim": D,
    "embed_dim": EMBED,
    "num_heads": 2,
    "nheads": H,
    "query": draw(B, H, M, D),
    "key": draw(B, H, N, D),
    "value": draw(B, H, N, D) + 1,
}
BATCHES = "q", "k", "v", "kv", "qkv", "dout", "x"
"""Operands whose first two dimensions packing joins."""
PACKED = PADDED | {name: PADDED[name].flatten(0, 1) for name in BATCHES}
for suffix, rows in (("_q", B * M), ("_k", B * N), ("", B * N)):
    cu = ints(0, rows // 2, rows)
    PACKED |= {f"cu_seqlens{suffix}": cu, f"cum_seq{suffix}": cu, f"max_seqlen{suffix}": rows, f"max{suffix}": rows}
for operands, layout in ((PADDED, None), (PACKED, tw.Varlen(PACKED["cu_seqlens_q"], PACKED["cu_seqlens_k"]))):
    found = tw.attention(operands["q"], operands["k"], operands["v"], layout=layout, return_lse=True)
    operands |= dict(zip(("out", "softmax_lse"), found, strict=True))
CUM = "cum_seq_q", "cum_seq_k"
BASES: dict[str, dict[str, Any]] = {
    "MHA.forward": {"x": draw(B, N, EMBED)},
    "diffusers.attend": {"query": PADDED["q"], "key": PADDED["k"], "value": PADDED["v"]},
    "transformers.layer.attend": {"module": torch.nn.Identity(), "attention_mask": None, "is_causal": False},
    "flash_attn.bert_padding.pad_input": {"hidden_states": draw(3, D)},
    "flash_attn_interface.get_scheduler_metadata": {
        **dict.fromkeys(("batch_size", "headdim", "max_seqlen_k", "max_seqlen_q", "num_heads_kv", "num_heads_q"), 2),
        "cache_seqlens": ints(3, 5),
    },
    "flash_attn.layers.rotary.apply_rotary_emb_torch": {"cos": PADDED["cos"][:M], "sin": PADDED["sin"][:M]},
}
"""Operands of a function that differ from those of its kind."""
NEUTRAL = {"softmax_scale": D**-0.5, "window_size_left": -1, "window_size_right": -1, "num_splits": 0}
"""What arguments without a default are if left alone; others are False, 0.0, or None where the types allow it."""
REQUIRED = object()

# ---- functions


class Callee(NamedTuple):
    """A function or a layer: how to call it with a dict, and its parameters."""

    name: str
    run: Callable[..., Any]
    parameters: dict[str, inspect.Parameter]

    @property
    def packed(self) -> bool:
        """Whether it takes packed sequences only."""
        return (
            any(n.startswith("cu_") and not self.may_be_left(n) for n in self.parameters) or "max_q" in self.parameters
        )

    def may_be_left(self, name: str) -> bool:
        return self.neutral(name) is not REQUIRED

    def neutral(self, name: str) -> Any:
        """What an argument is if it is left alone, although it may have no default."""
        at = self.parameters[name]
        if at.default is not at.empty:
            return at.default
        if name in NEUTRAL:
            return NEUTRAL[name]
        if at.annotation in (bool, float):
            return at.annotation()
        return None if NoneType in get_args(at.annotation) else REQUIRED

    def base(self, packed: bool = False) -> dict[str, Any]:
        """The arguments that have no default, with their neutral values or operands."""
        operands = PACKED if packed or self.packed else PADDED
        given = {}
        for name, at in self.parameters.items():
            if at.kind in (at.VAR_KEYWORD, at.VAR_POSITIONAL):
                continue
            if name in ("dq", "dk", "dv"):
                given[name] = torch.zeros_like(operands[name[1:]])
            elif at.default is at.empty and name not in self.own:
                given[name] = self.neutral(name) if self.may_be_left(name) and name not in CUM else operands[name]
        return given | self.own

    @property
    def own(self) -> dict[str, Any]:
        return BASES.get(self.name, {})


def fresh(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose tensors a call may write to."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


def layer(kind: type, own: dict[str, Any], given: dict[str, Any]) -> Any:
    """Make a layer by `own` and the arguments self.…, and call it."""
    made = {name.removeprefix("self."): value for name, value in given.items() if name.startswith("self.")}
    called = {name: value for name, value in given.items() if not name.startswith("self.")}
    return kind(**own | made)(**called)


LAYERS = {
    "MHA": ({"embed_dim": EMBED, "num_heads": 2}, {"x": draw(B, N, EMBED)}),
    "RotaryEmbedding": ({"dim": D}, {"qkv": PADDED["qkv"]}),
    **dict.fromkeys(("FlashSelfAttention", "SelfAttention"), ({}, {"qkv": PADDED["qkv"]})),
    **dict.fromkeys(("FlashCrossAttention", "CrossAttention"), ({}, {"q": PADDED["q"], "kv": PADDED["kv"]})),
}
"""How each layer is made, and called."""


def of_sdpa(given: dict[str, Any]) -> Any:
    with sdpa.use(devices=("cpu",), always=True):
        return torch.nn.functional.scaled_dot_product_attention(**given)


def of_torch_flash(given: dict[str, Any]) -> Any:
    """What tilewise makes of a call of aten::_flash_attention_forward; PyTorch gets what it returns a text for."""
    handle = torch_flash.Handle(("cpu",))
    try:
        found = handle.translated(**given)
    finally:
        handle.remove()
    return object() if isinstance(found, str) else (*found[0][:3], *found[0].extra, str(found[1]))


def while_used(given: dict[str, Any]) -> str:
    q = torch.zeros(1, 1, 4, 8)
    with sdpa.use(**given), tw.count_calls() as calls:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    return str(calls)


def while_installed(given: dict[str, Any]) -> str:
    sdpa.install(**given)
    try:
        return str(sdpa._settings)
    finally:
        sdpa.uninstall()


def while_registered(given: dict[str, Any]) -> str:
    torch_flash.register(**given)
    q, cu = torch.zeros(4, 1, 8), ints(0, 4)
    torch.nn.attention.activate_flash_attention_impl(given.get("name", "tilewise"))
    try:
        with tw.count_calls() as calls, suppress(NotImplementedError):  # PyTorch has no such kernel for CPUs
            torch.ops.aten._flash_attention_forward(q, q, q, cu, cu, 4, 4, 0.0, False, False)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    return f"{calls} {sorted(torch.nn.attention.list_flash_attention_impls())}"


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: at for name, at in inspect.signature(function).parameters.items() if name != "self"}


def callees() -> Iterator[Callee]:
    """Whatever the modules export; then PyTorch's function and operator, and what sends their calls here."""
    for module in MODULES:
        for name in module.__all__:
            one = getattr(module, name)
            if inspect.isclass(one):
                made, called = LAYERS[name]
                run = lambda given, one=one, called=called: one(**given)(**fresh(called))  # noqa: E731
                yield Callee(f"{name}.__init__", run, parameters_of(one))
                yield Callee(f"{name}.forward", partial(layer, one, made), parameters_of(one.forward))
            elif inspect.isfunction(one) and (name != "rearrange" or find_spec("einops")):
                path = module.__name__.partition("compat.")[2]
                yield Callee(f"{path}.{name}", lambda given, one=one: one(**given), parameters_of(one))
    for module in (diffusers, transformers):
        run = lambda given, one=module.attend: one(**given)  # noqa: E731
        yield Callee(f"{module.__name__.partition('compat.')[2]}.attend", run, parameters_of(module.attend))
    run = lambda given: flex.flex_attention(**given)  # noqa: E731
    yield Callee("flex", run, parameters_of(flex.flex_attention))
    yield Callee("sdpa", of_sdpa, parameters_of(sdpa._route))
    yield Callee("sdpa.use", while_used, parameters_of(sdpa.use))
    yield Callee("sdpa.install", while_installed, parameters_of(sdpa.install))
    yield Callee("torch_flash", of_torch_flash, parameters_of(torch_flash.Handle.translated))
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        yield Callee("torch_flash.register", while_registered, parameters_of(torch_flash.register))


CALLEES = {one.name: one for one in callees()}

# ---- values


class With(NamedTuple):
    """A value that matters where others are given, too: what these others are, by the callee and its base."""

    value: Any
    others: Callable[[Callee, dict[str, Any]], dict[str, Any]]


def beside(value: Any, /, **others: Any) -> With:
    """Give those of the others that the function has."""
    return With(value, lambda callee, _: {n: v for n, v in others.items() if n in callee.parameters or "." in n})


def packed(value: Any, /, **others: Any) -> With:
    """Pack every operand."""

    def all_packed(callee: Callee, _: dict[str, Any]) -> dict[str, Any]:
        given = callee.base(packed=True)
        if callee.name == "MHA.forward":
            given["x"] = given["x"].flatten(0, 1)
        rows = next(given[name].shape[0] for name in ("x", "q", "qkv") if name in given)
        lengths = {n: v for n, v in PACKED.items() if n.startswith(("cu_", "max_"))}
        lengths |= {"cu_seqlens": ints(0, 1, rows)} | others
        of_layer = {"self.use_flash_attn": True} if callee.name == "MHA.forward" else {}
        return given | {n: v for n, v in lengths.items() if n in callee.parameters} | of_layer

    return With(value, all_packed)


def paged(value: Any, /, **others: Any) -> With:
    """Put keys and values in pages."""

    def pages(callee: Callee, given: dict[str, Any]) -> dict[str, Any]:
        pair = next(p for p in (("k_cache", "v_cache"), ("kcache", "vcache"), ("k", "v")) if set(p) <= given.keys())
        tables = {n: ints(0, 1)[:, None] for n in ("block_table", "page_table") if n in callee.parameters}
        return {n: PADDED[n] for n in pair} | tables | {n: v for n, v in others.items() if n in callee.parameters}

    return With(value, pages)


def in_e4m3(value: Any) -> With:
    return With(
        value,
        lambda _, given: {
            n: t.to(torch.float8_e4m3fn) for n, t in given.items() if n in (*BATCHES, "k_cache", "v_cache")
        },
    )


TABLE = ints(1, 0)[:, None]
OTHER = draw(2 * N, D // 2) + 3
ADDED = {
    **dict.fromkeys(("k", "v"), draw(B, NEW, H_K, D)),
    **dict.fromkeys(("cache_seqlens", "seqlens_k"), ints(3, 5)),
}
TURNED = ADDED | {"rotary_cos": draw(2 * N, D // 2), "rotary_sin": OTHER}
ADDED_ROWS = ADDED | {name: ADDED[name].flatten(0, 1) for name in "kv"}
JOINT = draw(B, N, H + 2 * H_K, D)
LISTED: dict[str, list[Any]] = {
    "_parallel_config": [object()],
    "alibi_slopes": [draw(H).abs()],
    "always": [beside(True, devices=("cpu",))],
    "attention_chunk": [3, -4],
    "attention_dropout dropout": [0.5],
    "attention_mask attn_mask": [torch.eye(M, N, dtype=torch.bool)],
    "aux_scalars aux_tensors block_sparse_tensors block_sparse_tensors_bwd": [[draw(2)]],
    "base": [100.0],
    "block_table page_table": [paged(TABLE), paged(TABLE, seqused_k=ints(3, 6))],
    "block_mask": [flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, M, N)],
    "cache_batch_idx kv_batch_idx": [ints(1, 0), paged(ints(1, 0))],
    "cache_leftpad leftpad_k": [ints(1, 2), paged(ints(1, 2))],
    "cache_seqlens seqlens_k": [ints(3, 6)],
    "causal conjugate cross_attn dwconv inplace interleaved is_causal": [True],
    "cos_k sin_k": [OTHER],
    "cu_seqlens": [ints(0, 3, B * M), packed(ints(0, 3, B * M))],
    "cu_seqlens_k": [ints(0, 3, B * N), packed(ints(0, 3, B * N))],
    "cu_seqlens_k_new": [ints(0, 1, 4), packed(ints(0, 1, 4), **ADDED_ROWS, cu_seqlens_k_new=ints(0, 2, 4))],
    "cu_seqlens_q": [ints(0, 3, B * M), packed(ints(0, 3, B * M))],
    "cum_seq_k cum_seq_q": [ints(0, 3, B * M)],
    "device": ["meta"],
    "devices": [beside(("cpu",), always=True)],
    "dk dq dv": [None],
    "dropout_p p_dropout": [beside(0.5, rng_state=torch.tensor([4, 0]))],
    "dtype": [torch.float64],
    "enable_gqa": [beside(True, key=PADDED["key"][:, :2], value=PADDED["value"][:, :2])],
    "gather_kv_indices k_new qv v_new": [PADDED["q"]],
    "gen": [torch.Generator()],
    "inference_params": [{}],
    "is_rotary_interleaved": [beside(True, **TURNED)],
    "k v": [draw(B, NEW, H_K, D), beside(draw(B, NEW, H_K, D) + 1, **ADDED)],
    "k_descale q_descale v_descale": [in_e4m3(torch.tensor(2.0))],
    "key_padding_mask": [torch.arange(N) < torch.tensor([[3], [6]])],
    "kv": [beside(PADDED["kv"], qkv=PADDED["q"])],
    "learnable_sink s_aux": [draw(H), draw(H).half()],
    "mask_mod score_mod score_mod_bwd": [lambda s, b, h, i, j: s * j],
    "mixer_subset": [slice(0, 2), beside(slice(0, 2), **{"self.cross_attn": True})],
    "name": ["of-a-test"],
    "num_heads_kv": [1],
    "num_heads_q": [2, beside(6, qkv=JOINT, num_heads_q=H), beside(2, qkv=PADDED["q"], kv=PADDED["kv"])],
    "out_dtype": [torch.bfloat16, beside(torch.bfloat16, out=torch.zeros(B, M, H, D))],
    "out_proj_bias qkv_proj_bias": [False],
    "position_bias": [draw(H, M, N)],
    "return_aux": [flex.AuxRequest(lse=True)],
    "return_attn_probs return_residual return_softmax_lse": [True],
    "return_lse": [True, False],
    "return_softmax": [beside(True, dropout_p=0.5, p_dropout=0.5)],
    "rng_state": [beside(torch.tensor([3, 0]), dropout_p=0.5, p_dropout=0.5, rng_state=torch.tensor([4, 0]))],
    "rotary_cos rotary_sin": [OTHER, beside(OTHER + 1, **TURNED)],
    "rotary_emb_base": [beside(100.0, rotary_emb_dim=8)],
    "rotary_emb_dim": [8],
    "rotary_emb_interleaved": [beside(True, rotary_emb_dim=8)],
    "rotary_emb_scale_base": [beside(16.0, rotary_emb_dim=8)],
    "rotary_interleaved": [beside(False, **TURNED)],
    "rotary_seqlens": [ints(0, 1), beside(ints(0, 1), **TURNED)],
    "scale scaling softmax_scale": [0.3],
    "scale_base": [16.0],
    "seqlen_offset seqlen_offsets": [2],
    "seqlens_rotary": [ints(0, 1)],
    "sequed_k seqused_k": [ints(3, 6), packed(ints(3, 6))],
    "sequed_q seqused_q": [ints(2, 4), packed(ints(2, 4)), paged(ints(2, 4))],
    "sliding_window": [2],
    "softcap": [3.0],
    "unused_mask": [(torch.arange(M) == 4).expand(B, M)],
    "use_alibi": [True, beside(True, use_flash_attn=True)],
    "window_size": [(2, 1), (2, -1)],
    "window_size_left window_size_right": [2],
    "x_kv": [draw(B, 3, EMBED), beside(draw(B, 3, EMBED), **{"self.cross_attn": True})],
}
VALUES = {name: values for names, values in LISTED.items() for name in names.split()} | {"out": [], "out_": []}
"""Of each argument the values that must matter, alone or beside others."""


def values_of(callee: Callee, name: str) -> list[Any]:
    """Values of an argument; a tensor to be written has its result's shape."""
    if name in ("out", "out_"):
        like = callee.base().get("q")
        return [torch.zeros(B, M, H, D) if like is None else torch.zeros_like(like)]
    return [value for value in VALUES[name] if value is not callee.neutral(name)]


# ---- the comparison


class Outcome(NamedTuple):
    """What a call returned and wrote to, or its error."""

    found: list[Any]
    error: Exception | None = None

    def names(self, *arguments: str) -> bool:
        return any(re.search(rf"\b{name.removeprefix('self.')}\b", str(self.error)) for name in arguments)


def flat(found: Any) -> list[Any]:
    """Tensors and other values of what was returned, in order."""
    return [t for part in found for t in flat(part)] if isinstance(found, (tuple, list)) else [found]


def outcome(callee: Callee, given: dict[str, Any]) -> Outcome:
    own = fresh(given)
    torch.manual_seed(0)
    try:
        found = flat(callee.run(own))
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        return Outcome([], error)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    written = [(name, own[name]) for name, before in tensors.items() if not same(own[name], before)]
    return Outcome([t.detach() if isinstance(t, Tensor) else t for t in (*found, *flat(written))])


def same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device) or a.is_meta:
        return False
    bits = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (a, b))
    return bool(torch.equal(*bits))


def cases() -> Iterator[tuple[str, str]]:
    """Every argument that may be left out, but the hints."""
    for callee in CALLEES.values():
        for name, at in callee.parameters.items():
            parts = callee.name.split(".")
            hint = HINTS.keys() & {name, *parts, *[f"{part}.{name}" for part in parts]}
            if at.kind not in (at.VAR_KEYWORD, at.VAR_POSITIONAL) and callee.may_be_left(name) and not hint:
                yield callee.name, name


@pytest.mark.parametrize(("function", "name"), list(cases()))
def test_an_argument_is_used_or_refused_by_name(function, name):
    callee = CALLEES[function]
    assert name in VALUES, f"say in VALUES which value of {name} must matter, or in HINTS why none can"
    for value in values_of(callee, name):
        given = callee.base()
        others = value.others(callee, given) if isinstance(value, With) else {}
        without = outcome(callee, given | others)
        result = outcome(callee, given | others | {name: value.value if isinstance(value, With) else value})
        if result.error is None:
            changed = without.error is not None or len(result.found) != len(without.found)
            assert changed or not all(map(same, result.found, without.found)), f"{name} is dropped, silently"
        elif not result.names(name):
            refused = without.error is not None and without.names(*others)
            refused |= name.startswith("cu_") and "must have shape (T, " in str(result.error)
            assert refused, f"the error does not name {name}: {result.error!r}"


def test_the_neutral_calls_run():
    for callee in CALLEES.values():
        error = outcome(callee, callee.base()).error
        assert error is None, f"{callee.name}: {error!r}"


def test_the_tables_name_what_there_is():
    known = {name for callee in CALLEES.values() for name in callee.parameters}
    assert VALUES.keys() - known == set()
    assert {name.rpartition(".")[2] for name in HINTS} - known == {"get_scheduler_metadata"}
    assert VALUES.keys() & HINTS.keys() == set()
