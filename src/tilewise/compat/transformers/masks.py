"""Read masks of transformers back into tilewise's values, once per forward and kind of layer.

transformers describes a mask as a function of (batch, head, query, key) indices that is made of closures, with offsets
for keys that a cache holds. It builds these functions in `transformers.masking_utils`, whose names are known here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...values.cached import Cached
from ...values.intervals import Causal, Padding, Window, padding_facts, padding_run
from ...values.masks import Mask, intersect
from ...values.tables import Dense, Documents
from ...values.value import Unsupported
from .view import SHARDED, MaskView, Values, warn_drawn


class Pattern(NamedTuple):
    """A mask function of transformers: the intersection of intervals and of runs of tokens that see each other."""

    intervals: tuple[Mask, ...] = ()
    packed: bool = False
    """Whether runs are documents, which transformers finds where position ids start again."""
    chunked: bool = False
    """Whether runs are chunks of a fixed length, counted from the first real token."""


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> MaskView | Tensor:
    """Return a MaskView; under torch.compile without values, and for a step of one token without, a bool tensor.

    The signature is that of transformers' mask interface. `attention_mask` is bool (B, length), true for real tokens,
    or a MaskView that was made before. The tensor is (B, 1, M, N), true where the query sees the key.
    """
    from transformers.masking_utils import causal_mask_function

    if isinstance(attention_mask, MaskView):  # generate() has prepared it, and the model asks again
        return attention_mask
    function = mask_function or causal_mask_function
    one_step = q_length == 1 and (isinstance(q_offset, Tensor) or not allow_is_causal_skip)
    if isinstance(q_offset, Tensor) and not one_step:
        q_offset = q_offset.clone()  # the cache counts on in place, before its layer computes attention
    asked = Request(batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, use_vmap, device)
    if SHARDED:
        return asked.of_whole()
    if not torch.compiler.is_compiling():
        pattern = read(function)
        if one_step:
            return asked.step(pattern)
        settle = partial(asked.values, pattern)
        return MaskView(asked.shape, asked.facts(pattern), settle, asked.draw, asked.reason(pattern))
    unread = use_vmap or (one_step and attention_mask is not None)  # a graph cannot read the kind of padding
    bidirectional = allow_is_bidirectional_skip is not None
    pattern = None if unread else pattern_of(function, local_size, config, allow_is_causal_skip, bidirectional)
    if one_step:  # its inputs are of one kind and shape
        return asked.step(pattern)
    values = None if isinstance(q_offset, Tensor) else asked.values(pattern, None)
    if values is None:
        warn_drawn(asked.reason(pattern))
        return asked.draw()
    return MaskView(asked.shape, (), lambda _: values, asked.draw, "")


class Request(NamedTuple):
    """What transformers asks a mask for."""

    batch: int
    M: int
    N: int
    q_offset: int | Tensor
    kv_offset: int
    function: Callable[..., Any]
    real: Tensor | None
    use_vmap: bool
    device: torch.device | str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (B, 1, M, N)."""
        return self.batch, 1, self.M, self.N

    def reason(self, pattern: Pattern | None) -> str:
        """Return why the mask would have to be drawn, for a warning."""
        if pattern is not None:
            return "its last query is not aligned with its last key"
        return f"tilewise has no value for {getattr(self.function, '__qualname__', self.function)}"

    def of_whole(self) -> MaskView:
        """Return the mask of the whole whose rows are sharded.

        Runs of position ids are no documents there, as a rank's rows jump; documents come with the sharding.
        """
        pattern = read(self.function)
        if self.real is not None or pattern is None or pattern.chunked or self.M != self.N:
            raise Unsupported(
                "sharded rows have no padding, chunks or caches of keys, and no mask of the model's own; "
                "leave attention_mask out, pass use_cache=False, or choose another model"
            )
        view = MaskView(self.shape, (), lambda _: Values(intersect(pattern.intervals), self.N), self.draw, "")
        view.sharded = SHARDED[-1]
        return view

    def draw(self) -> Tensor:
        """Return the bool tensor (B, 1, M, N) that transformers' sdpa would get."""
        from transformers.masking_utils import sdpa_mask

        drawn = sdpa_mask(
            batch_size=self.batch, q_length=self.M, kv_length=self.N, q_offset=self.q_offset,  # type: ignore[arg-type]
            kv_offset=self.kv_offset, mask_function=self.function, attention_mask=self.real, use_vmap=self.use_vmap,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=self.device,
        )  # fmt: skip
        assert drawn is not None
        return drawn

    def step(self, pattern: Pattern | None) -> MaskView | Tensor:
        """Return the mask of one query on a static cache: by lengths and starts on the device, else drawn.

        With padding this reads the device, to see whether each row is one run of real tokens up to the query's own.
        """
        if pattern is None or pattern.packed or pattern.chunked or Causal() not in pattern.intervals:
            return self.draw()
        ahead = self.M - self.kv_offset
        stop = self.q_offset + ahead
        end = stop.reshape(-1).to(torch.int32) if isinstance(stop, Tensor) else torch.tensor([stop], dtype=torch.int32)
        lengths, starts = end.to(self.device).expand(self.batch).contiguous(), None
        if self.real is not None:
            real = self.real[:, self.kv_offset : self.kv_offset + self.N]
            starts, at = lengths - real.sum(1, dtype=torch.int32), torch.arange(real.shape[1], device=self.device)
            one_run = (at >= starts[:, None]) & (at < lengths[:, None])
            if not torch.equal(real, one_run):
                return self.draw()

        def draw() -> Tensor:
            return self._replace(q_offset=stop - ahead).draw()  # as the cache counts q_offset on in place

        view = MaskView(self.shape, (), lambda _: Values(Dense(draw()), self.N), draw, "")
        view.cached = intersect(pattern.intervals), Cached(lengths, starts=starts)
        return view

    def facts(self, pattern: Pattern | None) -> tuple[Tensor, ...]:
        """Return what `values` needs to know from the device, in its order: the offset, and the kind of padding."""
        offset = (self.q_offset,) if isinstance(self.q_offset, Tensor) and pattern not in (None, Pattern()) else ()
        if self.real is None:
            return offset
        return *offset, *padding_facts(self.real[:, self.kv_offset : self.kv_offset + self.N])

    def values(self, pattern: Pattern | None, read: Sequence[int] | None) -> Values | None:
        """Return the mask as values, or None if it has none. `read`: the facts, or None if they cannot be read."""
        keys, facts = self.N, None if read is None else list(read)
        if pattern is not None and pattern != Pattern():  # where the mask looks at positions
            offset = facts.pop(0) if facts and isinstance(self.q_offset, Tensor) else self.q_offset
            end = offset + self.M - self.kv_offset  # the keys up to the last query's own
            if end > self.N or (end < self.N and Causal() not in pattern.intervals):
                pattern = None
            else:
                keys = int(end)
        if pattern is not None:
            parts = pattern.intervals
            if pattern.packed or pattern.chunked:
                runs = self.runs()
                parts += (Documents(runs[:, keys - self.M : keys], runs[:, :keys]),)
        elif read is None or not (parts := self.traced()):  # a graph cannot trace
            return None
        padding = () if self.real is None else self.padding(self.real, keys, facts)
        packed = None if pattern is None or pattern.chunked or padding else intersect(pattern.intervals)
        return Values(intersect(parts + padding), keys, packed)

    def traced(self) -> tuple[Mask, ...]:
        """Return the function as a mask, which reads positions by the offsets; nothing if no program can be of it."""
        from transformers.masking_utils import add_offsets_to_mask_function

        try:
            return (Mask.of(add_offsets_to_mask_function(self.function, self.q_offset, self.kv_offset)),)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return ()

    def runs(self) -> Tensor:
        """Number the runs of tokens of which each sees the one before it: int32 (B, N)."""
        entry = torch.arange(self.batch, device=self.device)[:, None]
        at = torch.arange(self.N, device=self.device)[None, :] + self.kv_offset
        joined = self.function(entry, torch.zeros_like(entry), at[:, 1:], at[:, :-1])
        return pad(~joined.expand(self.batch, -1), (1, 0)).cumsum(1, dtype=torch.int32)

    def padding(self, real: Tensor, keys: int, facts: Sequence[int] | None) -> tuple[Mask, ...]:
        """Return what hides padded keys: nothing, an interval mask, or bools (B, keys)."""
        real = real[:, self.kv_offset : self.kv_offset + keys]
        missing = keys - real.shape[1]  # what a static cache has room for
        if facts is not None:
            whole, prefix, run = facts
            if whole and not missing:
                return ()
            if run:
                return (padding_run(real, bool(prefix)),)
        return (Padding(pad(real, (0, missing))),)


def name_of(function: Any) -> str:
    """Return a function's name; for a closure, that of the function which made it."""
    return getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]


def held_by(function: Any) -> dict[str, Any]:
    """Return what a closure captured, by name."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def read(function: Any) -> Pattern | None:
    """Return the pattern that a mask function's closures spell, or None for one that is not here."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    name, held = name_of(function), held_by(function)
    if name == "causal_mask_function":
        return Pattern((Causal(),))
    if name == "bidirectional_mask_function":
        return Pattern()
    if name == "sliding_window_overlay" and held["sliding_window"] > 0:
        return Pattern((Window(held["sliding_window"] - 1, None),))
    if name == "sliding_window_bidirectional_overlay":
        return Pattern((Window(held["sliding_window"], held["sliding_window"]),))
    if name == "packed_sequence_mask_function":
        return Pattern(packed=True)
    if name == "chunked_overlay":
        return Pattern(chunked=True)
    if name == "remap_positions_for_packed_sequence":  # in a document, positions count by one, as indices do
        return read(held["mask_function"])
    if name == "and_masks":
        parts = [read(each) for each in held["mask_functions"]]
        found = [part for part in parts if part is not None]
        if len(found) == len(parts):
            intervals = tuple(each for part in found for each in part.intervals)
            return Pattern(intervals, any(part.packed for part in found), any(part.chunked for part in found))
    return None


def pattern_of(function: Any, local: int | None, config: Any, causal_skip: bool, bidirectional: bool) -> Pattern | None:
    """Return what `read` does under torch.compile, where closures cannot be read: from what else transformers passes.

    A causal intersection is packed, unless transformers could have left it out. Chunks are windows cut into runs.
    """
    if function.__name__ == "causal_mask_function":
        return Pattern((Causal(),))
    if function.__name__ == "bidirectional_mask_function":
        return Pattern()
    if function.__name__ != "and_mask":
        return None
    if bidirectional:
        return None if local is None else Pattern((Window(local, local),))
    intervals = (Causal(),) if local is None else (Causal(), Window(local - 1, None))
    chunked = local is not None and getattr(config, "attention_chunk_size", None) is not None
    return Pattern(intervals, not causal_skip, chunked)
