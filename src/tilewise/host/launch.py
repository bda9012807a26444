"""Kernel arguments and launches, for all GPU back ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from ..dropout import dropout_rescale, dropout_threshold
from ..mask import TileList
from ..problem import Grads, Operands, Problem, Saved, empty_parts
from ..score import Bias
from ..tile import masks, scores
from ..tile.bias import Broadcast, Kind, attention_backward_dbias
from ..tile.cache import Batch, Scales
from ..tile.dropout import Counters, Dropout
from ..tile.ranges import TileLists, attention_list_tiles
from ..tile.renormalize import attention_backward_renormalize
from ..tile.rows import Output, Packed, Rows, Unused
from .compile_once import compile_once, hash_in_order
from .direct import direct

DEVICE_MASKS: Any = masks
DEVICE_SCORES: Any = scores
"""The modules in which we look up the device functions of masks and scores by name."""

FUSED = {"enable_fp_fusion": True}
"""A compiler option of every kernel: a product and a sum may become one multiply-add. Triton 3.10 no longer fuses them
by default, which changes results and times."""

NARROW = (16, 32)
"""Head sizes whose blocks have fewer than 64 columns in 16-bit types."""

EMPTY_CUDA: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]
"""What PyTorch's compiled code allocates with, in half the time of torch.empty."""

TILE_LIST = TileList.__name__
"""What a recipe calls it."""

NO_CONTEXT = nullcontext()
"""A context that does nothing, made once because every call enters it."""


def on_device(q: Tensor) -> AbstractContextManager[Any]:
    """Return a context that makes q's device current, as Triton launches there. It is free if that is so already."""
    if not q.is_cuda or q.device.index == torch._C._cuda_getDevice():
        return NO_CONTEXT
    return torch.cuda.device(q.device)


def current_stream(device: torch.device) -> int | None:
    """Return the handle of a GPU's current stream; None for another device."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


@lru_cache(64)
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; an H200's, where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def profiled() -> bool:
    """Tell whether a profiler has set launch hooks."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))  # a single hook has no `calls`


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def odd(n: int) -> int:
    """Return a count as a kernel takes it inside a tuple: 2 n + 1. There Triton would make a constant of a 1, note
    multiples of 16, and compile again for each, whatever `do_not_specialize` says. So 0 stays 0, as half of it is."""
    return 2 * n + 1 if n else 0


def odd_counts(shape: Any) -> Any:
    """Return a kernel's `Shape` with every count made `odd`. Factors and functions stay as they are."""
    return type(shape)(*(odd(x) if isinstance(x, int) else x for x in shape))


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


class Launch(NamedTuple):
    """A kernel with its arguments, ready to run, or to compile for a chip that is not installed."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: dict[Any, Any]
    """The problem's cache of compiled kernels, by kernel and `key`. Triton's own look-up takes longer than the rest of
    a call. All that it looks at follows from the problem, except what `key` holds."""
    key: Any = None

    def run(self, stream: int | None = None) -> None:
        """Launch the kernel on the current stream, unless it has no programs. `stream`, its handle, saves a look-up."""
        if not self.programs:
            return
        at = self.kernel.fn, self.key  # Triton's own objects are slow to hash
        if at not in self.compiled:
            self.run_first(at)
            return
        compiled, rest, at_once = self.compiled[at]
        if stream is None or profiled():
            compiled[(self.programs, 1, 1)](*self.arguments, *rest, stream=stream)
        elif at_once:
            at_once(self.programs, stream, self.arguments)
        else:  # the same without hooks: Triton prepares their arguments even if none is set
            compiled.run(
                self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *self.arguments, *rest,
            )  # fmt: skip

    def run_first(self, at: Any) -> None:
        """Compile the kernel or load it from Triton's cache, and run it; with a list in RECORDED, append it there."""
        if (foreseen := RECORDED.get()) is not None:
            foreseen.append(self)
            return
        if not knobs.runtime.interpret:
            hash_in_order(self.kernel, self.arguments)
        start = self.kernel[(self.programs,)]
        compiled = compile_once(self.kernel.fn.__name__, lambda: start(*self.arguments, **FUSED | self.constants))
        if compiled is not None:  # the interpreter compiles nothing
            rest = tuple([self.constants[name] for name in self.kernel.arg_names[len(self.arguments) :]])
            self.compiled[at] = compiled, rest, direct(compiled, self.arguments, rest)

    def compile(self) -> Any:
        """Compile the kernel for the active driver's target, without a GPU."""
        hash_in_order(self.kernel, self.arguments)
        return self.kernel.warmup(*self.arguments, grid=(1,), **FUSED | self.constants)


RECORDED: ContextVar[list[Launch] | None] = ContextVar("foreseen", default=None)
"""A list that records launches of kernels that are not compiled, in place of running them; None runs them. A back end
called on meta tensors thus records what the same call launches on a GPU (see precompile.py)."""


def unplanned(saved: Saved, do: Tensor, dlse: Tensor | None) -> Any:
    """Return what a backward's kernels depend on beside its problem. lse and dlse are contiguous."""
    aligned = [None if t is None else t.data_ptr() % 16 == 0 for t in (do, saved.o, saved.lse, dlse)]
    return do.stride(), saved.o.stride(), *aligned


def with_contiguous_lse(saved: Saved, dlse: Tensor | None) -> tuple[Saved, Tensor | None]:
    """Return a forward's results and dlse, with lse and dlse contiguous."""
    dlse = None if dlse is None else dlse.contiguous()
    return saved if saved.lse.is_contiguous() else saved._replace(lse=saved.lse.contiguous()), dlse


def tile_lists(
    p: Problem, pl: Any, tiles: Any, parts: Any, x: Operands, by_key: bool
) -> tuple[TileLists | None, list[Launch]]:
    """Return lists of the tiles with unmasked entries, and the launch that writes them.

    Interval masks need no lists: there the result is (None, []). A mask that carries its lists needs no launch. This
    function reads `listed` and `compiled` of the plan `pl`, and `B_r` and `B_c` of its tiles.
    """
    if not pl.listed:
        return None, []
    if TILE_LIST in [name for name, *_ in p.recipe.mask]:
        made = [part for part in p.values(x.extra)[0] if isinstance(part, TileList)]
        return addresses(made_for(made, tiles, by_key)), []
    lists, launch = new_lists(p, pl, tiles, parts, x.q.device, by_key)
    return addresses(lists), [launch]


def made_for(made: Sequence[TileList], tiles: Any, by_key: bool) -> Tensor:
    """Return the one of a mask's lists that holds these tiles. Raise ValueError if none does."""
    for one in made:
        if (one.by_key, one.B_r, one.B_c) == (by_key, tiles.B_r, tiles.B_c):
            return one.tiles
    shown = ", ".join(f"{one.B_r}x{one.B_c} by {'key' if one.by_key else 'query'}" for one in made)
    raise ValueError(
        f"mask must be listed for tiles of {tiles.B_r}x{tiles.B_c} by {'key' if by_key else 'query'}, got {shown}; "
        "call tilewise.listed with the type, head sizes and options of this call, and with gradients enabled if it has "
        "a backward"
    )


def make_lists(p: Problem, pl: Any, x: Operands, kernels: Sequence[tuple[Any, bool]]) -> tuple[TileList, ...]:
    """List the mask's tiles for every (tiles, by_key) of `kernels`, each kind once, on q's device. q, k and v of x
    are not read."""
    if not pl.listed:
        return ()
    parts, _, _ = device_values(p, x.extra)
    device, made = x.q.device, {}
    for tiles, by_key in kernels:
        kind = by_key, tiles.B_r, tiles.B_c
        if kind not in made:
            lists, launch = new_lists(p, pl, tiles, parts, device, by_key)
            launch.run(current_stream(device))
            made[kind] = TileList(lists, *kind, p.M, p.N)
    return tuple(made.values())


def new_lists(p: Problem, pl: Any, tiles: Any, parts: Any, device: torch.device, by_key: bool) -> tuple[Tensor, Launch]:
    """Return lists, unwritten, 4 bytes a tile: one per tile of queries, or `by_key` of keys; and what writes them."""
    of_rows, of_columns = cdiv(p.M, tiles.B_r), cdiv(p.N, tiles.B_c)
    count, across = (of_columns, of_rows) if by_key else (of_rows, of_columns)
    batch, heads = _mask_shape(p)
    lists = torch.empty((batch, heads, count, across + 2), dtype=torch.int32, device=device)
    kinds = torch.empty((batch, heads, count, across), dtype=torch.int8, device=device)
    constants = {"B_R": tiles.B_r, "B_C": tiles.B_c, "BY_KEY": by_key, "num_warps": 8}
    arguments = (addresses(lists), kinds, parts, p.M, p.N, heads, count, across)
    programs = batch * heads * count
    return lists, Launch(attention_list_tiles, programs, arguments, constants, pl.compiled, (tiles, by_key))


def addresses(lists: Tensor) -> TileLists:
    """Return lists as a kernel argument."""
    strides = [0 if size == 1 else stride for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)]
    return TileLists(lists, *(odd(stride + 1) for stride in (*strides, lists.stride(2))))


def _mask_shape(p: Problem) -> tuple[int, int]:
    """Return for how many batch entries and heads the mask differs."""
    differs = {"B": 1, "H": 1}
    wholes = [whole for kind in p.kinds[: len(p.recipe.mask)] for whole in kind.shapes]
    for whole, spec in zip(wholes, p.extra, strict=False):
        sizes = zip(reversed(whole), reversed(spec.shape), strict=False)
        differs |= {letter: size for letter, size in sizes if letter in differs and size != 1}
    return differs["B"], differs["H"]


def device_values(p: Problem, extra: tuple[Tensor, ...], own: Any = None) -> tuple[Any, Any, Tensor | None]:
    """Return the mask's parts and the scores as kernel arguments, and the sink.

    `own` is a back end's module of score functions, which take precedence over those of tile/scores.py.
    """
    mask, score, sink = p.values(extra)
    parts = tuple([_mask_part(p, part) for part in mask if not isinstance(part, TileList)])
    changes = tuple([_score_part(p, change, 1.0 if n else p.scale, own) for n, change in enumerate(score)])
    return parts, changes, None if sink is None else sink.contiguous()


def _mask_part(p: Problem, mask: Any) -> masks.Part:
    keep = getattr(DEVICE_MASKS, f"{mask.device}_keep")
    if not mask.interval:
        return masks.Part(keep, DEVICE_MASKS.everywhere, DEVICE_MASKS.everywhere, mask.arguments(p))
    keys, queries = (getattr(DEVICE_MASKS, f"{mask.device}_{side}") for side in ("keys", "queries"))
    return masks.Part(keep, keys, queries, mask.arguments(p))


def _score_part(p: Problem, score: Any, unit: float, own: Any) -> scores.Part:
    past = f"{score.device}_past"  # a simpler form for masks that hide later keys
    device = past if p.past and hasattr(own, f"{past}_fn") else score.device
    names = f"{device}_fn", f"{device}_grad"
    fn, grad = (getattr(own if hasattr(own, name) else DEVICE_SCORES, name) for name in names)
    return scores.Part(fn, grad, unit, score.arguments(p))


def packed(p: Problem, x: Operands) -> Packed | None:
    """Return the layout's cu_seqlens as a kernel argument; where keys are in a cache, those of queries."""
    if not p.rows_packed:
        return None
    if p.recipe.cached:  # whose max_q bounds nothing, and whose keys are not packed
        cu, longest = p.in_layout("cu_q", x.extra).contiguous(), odd(total_rows(p))
        return Packed(cu, cu, longest, longest)
    cu_q, cu_k = x.extra[-2:]
    return Packed(cu_q.contiguous(), cu_k.contiguous(), odd(p.max_q), odd(p.max_k))


def batch_of(p: Problem, x: Operands, least: int | None = None, most: int | None = None) -> Batch:
    """Return a cache as a kernel argument, for packed sequences of `least` to `most` queries."""
    return batch_from(lambda name: p.in_layout(name, x.extra), p.B, p.M, total_rows(p), p.N, least, most)


def batch_from(get: Callable[[str], Any], *sizes: int | None) -> Batch:
    """Return the tensors of a cache's layout, which `get` gives by name, and its sizes and bounds."""
    tensors = (None if t is None else t.contiguous() for t in map(get, ("cu_q", "lengths", "starts", "index")))
    cu_q, lengths, starts, index = tensors
    table = get("table")
    if table is not None and table.stride(-1) != 1:
        table = table.contiguous()
    width = 0 if table is None else odd(table.stride(0))
    given = [None if n is None else odd(n) for n in sizes]
    return Batch(cu_q, lengths, starts, index, table, width, *given)  # type: ignore[call-arg]


def scales_of(get: Callable[[str], Any], B: int, H_k: int) -> Scales | None:
    """Return the scales of 8-bit keys and values of a cache's layout as a kernel argument."""
    k, v = get("k_scale"), get("v_scale")
    if k is None:
        return None
    (k_batch, k_head), (v_batch, v_head) = (t.expand(B, H_k).stride() for t in (k, v))
    return Scales(k, k_batch, k_head, v, v_batch, v_head)


def total_rows(p: Problem) -> int:
    """Return how many rows of queries there are in all."""
    return p.q.shape[0] if p.rows_packed else p.B * p.M


def unused(p: Problem, saved: Saved | None = None, grads: Grads | None = None) -> Unused | None:
    """Return the tensors of which a kernel fills the rows outside all packed sequences: o and lse, or dq, dk and dv."""
    if not p.rows_packed:
        return None
    of_queries, of_keys, lse = (), (), None
    if saved:
        of_queries, lse = (output(saved.o, p.H),), saved.lse
    elif grads:
        of_queries = (output(grads.q, p.H),)
        of_keys = output(grads.k, p.H_k), output(grads.v, p.H_k)
    return Unused(of_queries, of_keys, lse, *map(odd, (p.B, *lengths(p))))


def output(t: Tensor, heads: int) -> Output:
    """Return an output of packed sequences, whose unused rows are filled."""
    return Output(rows(t), odd(heads), odd(t.shape[-1]))


def with_lse_shift(p: Problem, changes: tuple[Any, ...], lse: Tensor) -> tuple[Any, ...]:
    """Return the scores of a backward. With a bias, whose logits may be large, add one that subtracts lse."""
    if not p.biased:
        return changes
    shift = scores.Part(
        DEVICE_SCORES.minus_lse_fn, DEVICE_SCORES.minus_lse_grad, 1.0, (lse, *map(odd, (p.H, p.M, p.N)))
    )
    return (*changes, shift)


def dropout(p: Problem, seed: Tensor | None) -> Dropout | None:
    if seed is None:
        return None
    row, column, head, of_heads, batch = p.place
    numbers = (row, column, of_heads, batch * of_heads + head)
    counters = Counters(*map(odd, numbers)) if p.recipe.place else ()
    return Dropout(seed, dropout_threshold(p.recipe.dropout), dropout_rescale(p.recipe.dropout), counters)


def lengths(p: Problem) -> tuple[int, int]:
    """Return M and N as the kernels take them: for packed sequences, the total numbers of rows."""
    return p.q.shape[0] if p.rows_packed else p.M, p.k.shape[0] if p.recipe.varlen else p.N


def rows(t: Tensor) -> Rows:
    """Return an operand (B, M, H, D), or packed (T, H, D), with its strides. The last must be 1 (see `adjacent`)."""
    *batch, row, head, _ = t.stride()
    return Rows(t, batch[0] if batch else 0, row, head)


def rows_of_lse(lse: Tensor) -> Rows:
    """Return lse (B, H, M) or (H, M) with its strides, as rows of one number that lie side by side."""
    lse = lse if lse.stride(-1) == 1 else lse.contiguous()
    return Rows(lse, lse.stride(0) if lse.ndim == 3 else 0, 1, lse.stride(-2))


def with_adjacent_rows(x: Operands) -> Operands:
    """Return the operands with q, k and v as the kernels can read them (see `adjacent`)."""
    return Operands(adjacent(x.q), adjacent(x.k), adjacent(x.v), x.extra)


def adjacent(t: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy where Triton 3.6 would miscompile the kernel (docs/internals/adr/0004).

    That happens if the last stride is not 1, or if narrow rows start off 16-byte boundaries. Triton then loads the
    tensor in a layout whose products read outside shared memory.
    """
    side_by_side = t.stride(-1) == 1 or t.shape[-1] == 1
    return t if side_by_side and not narrow_and_unaligned(t) else t.clone(memory_format=torch.contiguous_format)


def narrow_and_unaligned(t: Tensor) -> bool:
    """Tell whether rows may start off 16-byte boundaries, in blocks of fewer than 64 columns (`blocks.width`).

    The compiler knows of a stride only whether it is a multiple of 16.
    """
    if t.itemsize != 2 or t.shape[-1] not in NARROW:
        return False
    return t.data_ptr() % 16 != 0 or any([stride % 16 for stride in t.stride()[:-1]])


def bias_launches(
    p: Problem, given: Any, variant: Any, unit: float, stride: int, grads: Grads, tiles: Any, constants: Any, pl: Any,
    key: Any,
) -> Iterator[Launch]:  # fmt: skip
    """Yield a launch for every bias that wants a gradient. `given`: the backward's Q, K, V, dO and `RowValues`."""
    index = sum(len(kind.captures) for kind in p.kinds[: len(p.recipe.mask)])
    for position, kind in enumerate(p.kinds[len(p.recipe.mask) :]):
        grad = grads.extra[index] if issubclass(kind, Bias) else None
        index += len(kind.captures)
        if grad is None:
            continue
        whole = grad[(None,) * (4 - grad.ndim)]
        batch, heads, length, width = whole.shape
        tiles_r, tiles_c = cdiv(length, tiles.B_r), cdiv(width, tiles.B_c)
        nothing = 0 in (p.B, p.M, p.N)
        b_each, *each = (1, 1, 1, 1) if nothing else (
            p.B // batch, p.H // heads,
            cdiv(p.M, tiles.B_r) if length == 1 else 1, cdiv(p.N, tiles.B_c) if width == 1 else 1,
        )  # fmt: skip
        steps = whole.stride()
        sizes = Broadcast(*map(odd, (heads, length, width, tiles_r, tiles_c, *each)))
        gradient = Rows(grad, steps[0], steps[2], steps[1])
        arguments = (*given, gradient, variant, unit, p.M, p.N, p.H, b_each, sizes, stride)
        programs = 0 if nothing else batch * heads * tiles_r * tiles_c
        bias = {"bias": Kind(position, length == 1, width == 1)}
        at = key, position, grad.data_ptr() % 16
        yield Launch(attention_backward_dbias, programs, arguments, {**bias, **constants}, pl.compiled, at)


def renormalize_launches(
    p: Problem, given: Any, lse: Tensor, variant: Any, unit: float, stride: int, tiles: Any, constants: Any, pl: Any,
    key: Any,
) -> list[Launch]:  # fmt: skip
    """Return the launch that overwrites L by the log of the row sums of P, which only a bias needs.

    It runs after the kernel that computes L from lse (tile/renormalize.py says why). `given` are Q, K and L.
    """
    if not p.biased:
        return []
    count = cdiv(p.M, tiles.B_r)
    arguments = (*given, lse, variant, unit, p.M, p.N, p.H, count, stride)
    return [Launch(attention_backward_renormalize, p.B * p.H * count, arguments, constants, pl.compiled, key)]


def empty_saved(p: Problem, x: Operands, seed: Tensor | None) -> Saved:
    """Allocate the outputs of a forward, unwritten."""
    of_o, of_lse, *_ = sizes(p)
    return Saved(empty(of_o, x.q.device), empty(of_lse, x.q.device), seed)


@lru_cache(4096)
def sizes(p: Problem) -> list[Any]:
    """Return the sizes of o, lse, dq, dk and dv."""
    *rows, H, _ = p.q.shape
    of_lse = (H, *rows) if p.rows_packed else (rows[0], H, rows[1])
    of_o, *others = [size(p.out_dtype, *shape) for shape in ((*rows, H, p.D_v), p.q.shape, p.k.shape, p.v.shape)]
    return [of_o, size(torch.float32, *of_lse), *others]


def size(dtype: torch.dtype, *shape: int) -> Any:
    """Return what `empty` takes for a contiguous tensor. (A torch.Size is no tuple for it.)"""
    return shape, torch.empty(shape, device="meta").stride(), dtype


def empty(size: Any, device: torch.device) -> Tensor:
    """Allocate a tensor, unwritten, on the CPU or the current GPU."""
    if EMPTY_CUDA is not None and device.type == "cuda":
        return EMPTY_CUDA(*size)
    shape, strides, dtype = size
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def empty_grads(p: Problem, x: Operands) -> Grads:
    """Allocate all gradients, unwritten."""
    q, k, v = empty_parts(p, x) if p.recipe.packed else [empty(size, x.q.device) for size in sizes(p)[2:]]
    return Grads(q, k, v, empty_extra(p, x))


def empty_extra(p: Problem, x: Operands) -> tuple[Tensor | None, ...]:
    """Allocate the gradients of the extras, as NaN; or as 0 if there are no rows to sum over."""
    if not p.wanted:
        return (None,) * len(x.extra)
    value = 0.0 if 0 in (p.B, p.M, p.N) else torch.nan
    return tuple(
        [
            torch.full(t.shape, value, dtype=t.dtype, device=t.device) if want else None
            for t, want in zip(x.extra, p.wanted, strict=True)
        ]
    )
