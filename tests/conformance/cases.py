"""One list of cases, for every back end.

A `Case` holds no tensor: `make(case, device)` draws its `Call`, the same numbers on every device. Masks and scores are
builders, functions of a `Draw`, which knows the case's sizes and hands out random tensors.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw

fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True, eq=False)
class Case:
    """One call of attention and of its backward."""

    name: str
    B: int = 2
    M: int = 33
    N: int = 53
    H: int = 2
    H_k: int = 2
    D: int = 16
    D_v: int | None = None
    dtype: torch.dtype = fp32
    mask: Callable[["Draw"], tw.Mask] = field(default=lambda draw: tw.Full())
    score: tuple[Callable[["Draw"], tw.Score], ...] = ()
    sink: torch.dtype | None = None
    dropout: float = 0.0
    scale: float | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    """Packed sequences, (queries, keys) each; B, M and N do not count then."""
    unowned: tuple[int, int] = (0, 0)
    """Packed queries and keys behind the last sequence. All that is given there is NaN."""
    loss: str = "both"
    """What the gradient comes through: "o", "lse" or "both"."""
    strides: str = "plain"
    """How the tensors lie in memory: a key of STRIDES, "packed" (views of one qkv tensor), or "qkvpacked" (the same,
    and the call is `attention_qkvpacked`)."""
    values: str = "normal"
    """A key of VALUES: what is done to the inputs before the call."""
    precision: str | None = None
    deterministic: bool = False
    size: str = "tiny"
    """ "tiny" runs everywhere, also in Triton's interpreter; "large" on GPUs, and a third on the CPU back end."""

    def __str__(self) -> str:
        return self.name


class Call(NamedTuple):
    """The tensors of a case on one device."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: tw.Mask
    score: tuple[tw.Score, ...]
    sink: Tensor | None
    layout: tw.Varlen | None
    seed: Tensor | None
    do: Tensor | None
    dlse: Tensor | None
    told: tw.EightBits | None = None
    """What 8-bit products are told beforehand."""


class Draw:
    """Random tensors for one case, drawn on the CPU from the case's name, then moved."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
        self.B = case.B if case.lengths is None else len(case.lengths)
        self.M = case.M if case.lengths is None else max((m for m, _ in case.lengths), default=0)
        self.N = case.N if case.lengths is None else max((n for _, n in case.lengths), default=0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal; drawn in fp32, so that the same numbers exist in fp64."""
        numbers = torch.randn(shape, generator=self.generator)
        return numbers.to(device=self.device, dtype=dtype or self.case.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to high, inclusive."""
        return torch.randint(high + 1, shape, generator=self.generator).to(self.device)

    def bools(self, *shape: int) -> Tensor:
        """True for six in ten."""
        return (torch.rand(shape, generator=self.generator) < 0.6).to(self.device)

    def key_lengths(self) -> Tensor:
        """A number of keys for each batch entry, no more than it has."""
        if self.case.lengths is None:
            return self.integers(self.N, self.B)
        return self.tensor([n * 2 // 3 for _, n in self.case.lengths])

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """The numbers, on the device."""
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def sizes(self, shape: str) -> tuple[int, ...]:
        """ "1HMN" as numbers."""
        of = {"B": self.B, "H": self.case.H, "M": self.M, "N": self.N, "1": 1}
        return tuple(of[letter] for letter in shape)


def make(case: Case, device: str) -> Call:
    """The tensors of a case."""
    draw = Draw(case, device)
    D_v = case.D_v or case.D
    packed = case.lengths is not None
    rows = (sum(m for m, _ in case.lengths) + case.unowned[0],) if packed else (case.B, case.M)
    columns = (sum(n for _, n in case.lengths) + case.unowned[1],) if packed else (case.B, case.N)
    shapes = ((*rows, case.H, case.D), (*columns, case.H_k, case.D), (*columns, case.H_k, D_v))
    if case.strides.endswith("packed"):  # (..., 3, H, D), as one projection gives q, k and v
        q, k, v = draw.normal(*rows, 3, case.H, case.D).unbind(-3)
    else:
        q, k, v = (STRIDES[case.strides](draw.normal(*shape)) for shape in shapes)
    q, k, v = VALUES[case.values](q, k, v)
    sink = None if case.sink is None else draw.normal(case.H, dtype=case.sink)
    do = STRIDES.get(case.strides, plain)(draw.normal(*rows, case.H, D_v))
    dlse = draw.normal(case.H, *rows) if packed else draw.normal(case.B, case.H, case.M)
    layout = None
    for t, count in zip((q, do, dlse.mT, k, v), case.unowned[:1] * 3 + case.unowned[1:] * 2, strict=True):
        if count:
            t[-count:] = torch.nan
    if packed:
        ends = torch.tensor([(0, 0), *case.lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        layout = tw.Varlen(ends[:, 0].contiguous(), ends[:, 1].contiguous(), draw.M, draw.N)
    return Call(
        q,
        k,
        v,
        case.mask(draw),
        tuple(build(draw) for build in case.score),
        every_second(sink) if sink is not None and case.strides == "every_second" else sink,
        layout,
        draw.tensor(0x123456789ABCDEF) if case.dropout else None,
        do if case.loss in ("o", "both") else None,
        dlse.to(fp64 if case.dtype == fp64 else fp32) if case.loss in ("lse", "both") else None,
    )


# ---- how tensors lie in memory: each gives a tensor (..., S, H, D) of the values it is given


def plain(t: Tensor) -> Tensor:
    return t


def heads_first(t: Tensor) -> Tensor:
    """(B, H, S, D) in memory."""
    return t.transpose(-3, -2).contiguous().transpose(-3, -2)


def sliced(t: Tensor) -> Tensor:
    """Inside a larger tensor full of NaN, off 16-byte boundaries."""
    around = t.new_full([size + 5 for size in t.shape], torch.nan)
    inside = around[tuple(slice(3, 3 + size) for size in t.shape)]
    return inside.copy_(t)


def every_second(t: Tensor) -> Tensor:
    """The last stride is 2, with NaN between the entries."""
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]


def size_first(t: Tensor) -> Tensor:
    """The head size is the outermost dimension in memory."""
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def one_head(t: Tensor) -> Tensor:
    """One head's memory for all: the head stride is 0."""
    return t[..., :1, :].expand(t.shape)


def one_batch(t: Tensor) -> Tensor:
    """One batch entry's memory for all: the batch stride is 0."""
    return t[:1].expand(t.shape)


def one_number(t: Tensor) -> Tensor:
    """All strides are 0, as in the gradient of a sum."""
    return t.new_full((), 0.5).expand(t.shape)


STRIDES = {
    f.__name__: f for f in (plain, heads_first, sliced, every_second, size_first, one_head, one_batch, one_number)
}

# ---- what is done to inputs


def _put(number: float, *where: int) -> Callable[..., Any]:
    """Puts the number into row 3, head 1, entry 2 of q (0), k (1) or v (2)."""

    def change(*qkv: Tensor) -> tuple[Tensor, ...]:
        for index in where:
            qkv[index][..., 3, 1, 2] = number
        return qkv

    return change


VALUES: dict[str, Callable[..., Any]] = {
    "normal": lambda q, k, v: (q, k, v),
    "large": lambda q, k, v: (q * 10, k * 10, v * 1000),
    "small": lambda q, k, v: (q * 1e-3, k * 1e-3, v * 1e-3),
    "shifted": lambda q, k, v: (q + 3, k + 3, v + 3),
    "zero": lambda q, k, v: (q * 0, k * 0, v * 0),
    "NaN in q": _put(torch.nan, 0),
    "inf in q": _put(torch.inf, 0),
    "NaN in k": _put(torch.nan, 1),
    "inf in k": _put(torch.inf, 1),
    "NaN in v": _put(torch.nan, 2),
    "inf in v": _put(-torch.inf, 2),
    "NaN in q, k and v": _put(torch.nan, 0, 1, 2),
}

# ---- masks and scores


def causal(draw: Draw) -> tw.Mask:
    return tw.Causal()


def window(left: int | None, right: int | None) -> Callable[[Draw], tw.Mask]:
    return lambda draw: tw.Window(left, right)


def prefix(draw: Draw) -> tw.Mask:
    return tw.Prefix(draw.key_lengths())


def padding(draw: Draw) -> tw.Mask:
    return tw.Padding(draw.key_lengths().to(torch.int32))


def padding_range(draw: Draw) -> tw.Mask:
    ends, starts = draw.key_lengths(), draw.key_lengths()
    return tw.Padding(torch.maximum(ends, starts), starts=torch.minimum(ends, starts).to(torch.int32))


def padding_bool(draw: Draw) -> tw.Mask:
    return tw.Padding(draw.bools(draw.B, draw.N))


def documents(draw: Draw) -> tw.Mask:
    """Three documents in a row; the last queries see the last keys."""
    q_ids, k_ids = (torch.arange(size, device=draw.device) * 3 // max(size, 1) for size in (draw.M, draw.N))
    return tw.Documents(q_ids.expand(draw.B, -1), k_ids.expand(draw.B, -1).to(torch.int32))


def spans(draw: Draw) -> tw.Mask:
    """Intervals of random lengths, some of them empty."""
    lo, hi = (draw.integers(draw.N + 1, draw.B, draw.M).sort(1)[0].to(torch.int32) for _ in range(2))
    return tw.Spans(lo, hi)


def spans_by_head(draw: Draw) -> tw.Mask:
    """Two intervals for each row of each head, in any order."""
    lo, sizes = (draw.integers(high, draw.B, draw.case.H, draw.M, 2) for high in (draw.N + 1, 9))
    return tw.Spans(lo, lo + sizes - 2)


def blocks(draw: Draw) -> tw.Mask:
    """Up to three blocks of 8 keys for every 16 rows, others for each head."""
    return tw.Blocks(draw.integers(-(-draw.N // 8), 1, draw.case.H, -(-draw.M // 16), 3) - 1, (16, 8))


def documents_mixed(draw: Draw) -> tw.Mask:
    return tw.Documents(draw.integers(3, draw.B, draw.M), draw.integers(3, draw.B, draw.N))


def dense(shape: str = "BHMN") -> Callable[[Draw], tw.Mask]:
    return lambda draw: tw.Dense(draw.bools(*draw.sizes(shape)))


def both(*builders: Callable[[Draw], tw.Mask]) -> Callable[[Draw], tw.Mask]:
    """The masks joined by `&`."""

    def build(draw: Draw) -> tw.Mask:
        joined = tw.Full()
        for builder in builders:
            joined = joined & builder(draw)
        return joined

    return build


def softcap(cap: float = 2.0) -> Callable[[Draw], tw.Score]:
    return lambda draw: tw.SoftCap(cap)


def alibi(shape: str = "H") -> Callable[[Draw], tw.Score]:
    return lambda draw: tw.Alibi(draw.normal(*draw.sizes(shape), dtype=fp32).abs() / 8)


def bias(shape: str = "BHMN", dtype: torch.dtype | None = None) -> Callable[[Draw], tw.Score]:
    return lambda draw: tw.Bias(draw.normal(*draw.sizes(shape), dtype=dtype))


def filled(number: float, *where: Any) -> Callable[[Draw], tw.Score]:
    """A bias (M, N) in fp32 that is one number in rows 0 and 1, or in the rows given."""

    def build(draw: Draw) -> tw.Score:
        entries = draw.normal(draw.M, draw.N, dtype=fp32)
        entries[where or slice(0, 2)] = number
        return tw.Bias(entries)

    return build


MASKS = {
    "causal": causal,
    "window": window(7, 4),
    "prefix": prefix,
    "padding": padding,
    "padding-bool": padding_bool,
    "documents": documents,
    "dense": dense(),
}
SCORES = {"softcap": softcap(), "alibi": alibi(), "bias": bias()}
WINDOWS = ((8, 0), (0, 8), (0, 0), (None, 6), (6, None), (None, None), (1000, 1000), (3, 0))
BROADCASTS = ("BHMN", "1HMN", "B1MN", "HMN", "MN", "B11N", "BHM1", "N", "M1", "")
LEAST = {dtype: torch.finfo(dtype).min for dtype in (fp16, bf16, fp32)}
PACKED = ((17, 17), (33, 33), (1, 1))
PACKED_ZERO = ((0, 5), (7, 0), (0, 0), (20, 33), (0, 0))
PACKED_DIFFERENT = ((5, 40), (40, 5), (33, 33), (1, 20))
PACKED_LONG = ((200, 300), (0, 5), (300, 300), (100, 40))


def _masks() -> Iterator[Case]:
    yield Case("full")
    for name, mask in MASKS.items():
        yield Case(name, mask=mask)
        yield Case(f"{name} square", M=49, N=49, mask=mask)
    for left, right in WINDOWS:
        yield Case(f"window {left} {right}", M=49, N=49, mask=window(left, right))
    yield Case("window one-sided M>N", M=53, N=33, mask=window(6, None))
    yield Case("prefix of 0", M=40, N=40, mask=lambda d: tw.Prefix(d.tensor([0, 0])))
    yield Case("prefix of all", M=40, N=40, mask=lambda d: tw.Prefix(d.tensor([40, 40])))
    yield Case("prefix short and long", B=3, M=40, N=57, mask=lambda d: tw.Prefix(d.tensor([1, 16, 56], torch.int32)))
    for N in (49, 70):
        yield Case(f"padding-range, N = {N}", M=49, N=N, mask=padding_range)
        yield Case(
            f"padding-range & causal & window, N = {N}", M=49, N=N, mask=both(padding_range, causal, window(9, 0))
        )
    yield Case("padding-range of none", mask=lambda d: tw.Padding(d.tensor([d.N, 9]), starts=d.tensor([d.N, 20])))
    yield Case("padding-range & documents", mask=both(padding_range, documents))
    yield Case("padding of 0 and all", B=3, mask=lambda d: tw.Padding(d.tensor([0, d.N, 1])))
    yield Case(
        "padding-bool of none", mask=lambda d: tw.Padding(d.tensor([[False], [True]], torch.bool).expand(2, d.N))
    )
    yield Case("documents mixed", mask=documents_mixed)
    yield Case("spans", M=70, N=90, mask=spans)
    yield Case("spans by head", M=70, N=90, mask=spans_by_head)
    yield Case("spans by head & documents varlen", mask=both(spans_by_head, documents), lengths=PACKED_DIFFERENT)
    yield Case("blocks, GQA", M=70, N=90, H=4, mask=blocks)
    yield Case("blocks & causal varlen", mask=both(blocks, causal), lengths=PACKED_DIFFERENT)
    yield Case("spans & causal, dropout", M=70, N=70, mask=both(spans, causal), dropout=0.2)
    for shape in BROADCASTS:
        yield Case(f"dense {shape or 'scalar'}", mask=dense(shape))
    yield Case("dense strided", mask=lambda d: tw.Dense(d.bools(d.B, d.N, d.case.H, d.M).permute(0, 2, 3, 1)))
    yield Case("dense of nothing", mask=lambda d: tw.Dense(d.bools(d.M, d.N) & False))
    yield Case("dense of half the tiles", M=70, N=70, mask=lambda d: tw.Dense(torch.arange(70, device=d.device) < 35))
    for a, b in combinations(MASKS, 2):
        yield Case(f"{a} & {b}", mask=both(MASKS[a], MASKS[b]))
    yield Case("causal & causal", mask=both(causal, causal))
    yield Case("window & window", M=49, N=49, mask=both(window(9, None), window(None, 2)))
    yield Case("prefix & window & padding", mask=both(prefix, window(20, 9), padding))
    yield Case("documents & dense & causal", mask=both(documents_mixed, dense("MN"), causal))
    yield Case("all masks", M=60, N=60, mask=both(*MASKS.values()))


def _scores() -> Iterator[Case]:
    for name, score in SCORES.items():
        yield Case(name, score=(score,))
        for mask in ("causal", "documents", "dense"):
            yield Case(f"{name}, {mask}", mask=MASKS[mask], score=(score,))
    yield Case("alibi per batch", score=(alibi("BH"),))
    for shape in BROADCASTS[1:]:
        yield Case(f"bias {shape or 'scalar'}", score=(bias(shape),))
    yield Case("bias strided", score=(lambda d: tw.Bias(d.normal(d.case.H, d.N, d.M).mT),))
    yield Case("bias expanded", score=(lambda d: tw.Bias(d.normal(1, 1, d.N).expand(d.case.H, d.M, d.N)),))
    for dtype, other in ((fp32, bf16), (fp32, fp64), (fp16, fp32), (bf16, fp16)):
        yield Case(f"bias {_name(other)} for {_name(dtype)}", dtype=dtype, score=(bias("HMN", other),))
    yield Case(
        "bias with -inf", score=(lambda d: tw.Bias(d.normal(d.M, d.N).masked_fill(~d.bools(d.M, d.N), -torch.inf)),)
    )
    yield Case("bias twice", score=(bias("HMN"), bias("B11N")))
    yield from _finite_biases()
    for order in permutations(SCORES, 2):
        yield Case(" then ".join(order), score=tuple(SCORES[name] for name in order))
    yield Case("softcap then bias then alibi then softcap", score=(softcap(1.5), bias("HMN"), alibi(), softcap(5.0)))
    yield Case("alibi, M>N, causal", M=53, N=33, mask=causal, score=(alibi(),))
    yield Case("softcap on large logits", values="large", score=(softcap(50.0),))
    for cap in (30.0, 50.0, 60.0):  # up to 55, bf16 needs no running maximum on Hopper
        name = f"softcap {cap:.0f} on large logits, causal, bf16"
        yield Case(name, dtype=bf16, values="large", mask=causal, score=(softcap(cap),))


def _finite_biases() -> Iterator[Case]:
    """Rows filled with what additive masks hold: finite, so that they are no rows without keys."""
    for dtype, least in LEAST.items():
        name, rows = f"bias rows of finfo({_name(dtype)}).min", filled(least)
        yield Case(name, score=(rows,))
        yield Case(f"{name}, causal", mask=causal, score=(rows,))
        yield Case(f"{name} in part", score=(filled(least, slice(0, 9), slice(0, 40)),))
        if dtype != fp32:  # in bf16 that is -inf
            yield Case(f"{name} for {_name(dtype)}", dtype=dtype, score=(rows,))
    rows = filled(LEAST[bf16])
    yield Case("softcap, bias rows of finfo.min", score=(softcap(), rows))
    yield Case("bias rows of finfo.min, softcap", score=(rows, softcap()))
    yield Case("bias rows of finfo.min, alibi, dense", mask=dense(), score=(rows, alibi()))
    yield Case("bias rows of finfo.min, GQA, causal", H=4, mask=causal, score=(rows,))
    yield Case("bias rows of finfo.min, sink", sink=fp32, score=(rows,))
    yield Case("bias rows of finfo.min, dropout", dropout=0.2, score=(rows,))
    yield Case("bias rows of -1e30, causal", mask=causal, score=(filled(-1e30),))
    yield Case("bias rows of -1e9", score=(filled(-1e9),))
    yield Case("bias of 3e38 in a column", score=(filled(3e38, slice(0, 9), 3),))
    yield Case("bias of 3e38 in two columns", score=(filled(3e38, slice(0, 9), slice(3, 5)),))


def _sink_and_dropout() -> Iterator[Case]:
    yield Case("sink", sink=fp32)
    for name, mask in MASKS.items():
        yield Case(f"sink, {name}", sink=fp32, mask=mask)
        yield Case(f"dropout, {name}", dropout=0.2, mask=mask)
    yield Case("sink bf16", sink=bf16, dtype=bf16, mask=causal)
    yield Case("sink fp32 for fp16", sink=fp32, dtype=fp16, mask=causal)
    yield Case("sink, softcap, bias", sink=fp32, score=(softcap(), bias("HMN")))
    yield Case("sink, rows without keys", sink=fp32, M=53, N=17, mask=causal)
    yield Case("sink every_second", sink=fp32, strides="every_second")
    for p in (0.1, 0.5, 0.95):
        yield Case(f"dropout {p}", dropout=p)
    yield Case("dropout fp16", dropout=0.3, dtype=fp16, mask=causal)
    yield Case("dropout bf16", dropout=0.3, dtype=bf16, M=64, N=64)
    yield Case("dropout, sink, scores", H=4, dropout=0.2, sink=fp32, score=(softcap(), bias("MN")), mask=causal)
    yield Case("dropout, GQA", dropout=0.2, H=4)


def _heads() -> Iterator[Case]:
    for D in (1, 3, 8, 16, 24, 40, 64, 72, 96, 128, 160, 256):
        yield Case(f"D {D}", B=1, D=D, M=40, N=40, mask=causal)
    for D in (40, 64, 128, 256):
        yield Case(f"D {D} fp16", B=1, D=D, dtype=fp16)
        yield Case(f"D {D} bf16", B=1, D=D, dtype=bf16, M=40, N=40, mask=causal)
    for D, D_v in ((16, 24), (64, 32), (8, 128), (1, 3), (3, 1), (256, 64), (64, 256)):
        yield Case(f"D {D} D_v {D_v}", B=1, D=D, D_v=D_v, mask=causal)
    for D, D_v in ((12, 8), (20, 4), (3, 1), (24, 16)):  # rows that are padded, with short ones, on matrix units
        for dtype in (fp16, bf16):
            yield Case(f"D {D} D_v {D_v} {_name(dtype)}", B=1, M=40, N=40, D=D, D_v=D_v, dtype=dtype, mask=causal)
    for name, H, H_k in (("GQA", 4, 2), ("MQA", 4, 1), ("GQA by 3", 6, 2)):
        yield Case(name, H=H, H_k=H_k)
        yield Case(f"{name} causal", H=H, H_k=H_k, mask=causal, M=40, N=40)
    yield Case("GQA bf16", H=4, dtype=bf16, mask=causal)
    yield Case("GQA D_v", H=4, D_v=40, mask=causal)
    yield Case("GQA alibi, bias, sink", H=4, score=(alibi(), bias("HMN")), sink=fp32)
    yield Case("GQA dense by head", H=4, mask=dense())
    yield Case("MQA documents, softcap", H=3, H_k=1, mask=documents, score=(softcap(),))
    yield Case("MQA expanded", H=4, H_k=2, strides="one_head", mask=causal)


def _wide() -> Iterator[Case]:
    """Head sizes above 256, which have rows of tiles of their own."""
    for D in (257, 264, 320, 384, 511, 512):
        yield Case(f"wide D {D}", B=1, D=D, M=40, N=40, mask=causal)
    for D, dtype in ((320, fp16), (511, bf16), (512, fp16), (512, bf16)):
        yield Case(f"wide D {D} {_name(dtype)}", B=1, M=40, N=45, D=D, dtype=dtype, mask=causal)
    for D, D_v in ((512, 64), (64, 512), (511, 264), (320, 1)):
        yield Case(f"wide D {D} D_v {D_v}", B=1, D=D, D_v=D_v, mask=causal)
    for D, D_v, dtype in ((513, 512, fp32), (576, 512, bf16), (576, 32, fp16)):
        yield Case(f"wide D {D} D_v {D_v} {_name(dtype)}", B=1, D=D, D_v=D_v, H=4, H_k=1, dtype=dtype, mask=causal)
    a = Case("", B=1, D=512)
    yield replace(a, name="wide GQA bf16", H=4, dtype=bf16, mask=causal)
    yield replace(a, name="wide MQA D_v", H=3, H_k=1, D=320, D_v=72)
    yield replace(a, name="wide bias, softcap", B=2, D=320, score=(softcap(), bias("HMN")), mask=causal)
    yield replace(a, name="wide bias, bf16", dtype=bf16, score=(bias("HMN"),))
    yield replace(a, name="wide bias rows of finfo.min", D=384, score=(filled(LEAST[fp32]),))
    yield replace(a, name="wide alibi, sink, dropout", B=2, D=384, score=(alibi(),), sink=fp32, dropout=0.2)
    yield replace(a, name="wide window & padding, bf16", B=2, dtype=bf16, mask=both(window(20, 9), padding))
    yield replace(a, name="wide documents, dropout", B=2, D=320, mask=documents, dropout=0.2)
    yield replace(a, name="wide dense fp16", dtype=fp16, mask=dense())
    yield replace(a, name="wide rows without keys", M=53, N=17, mask=causal, sink=fp32)
    yield replace(a, name="wide rows without keys bf16", M=53, N=17, dtype=bf16, mask=causal, dropout=0.2)
    yield replace(a, name="wide varlen GQA", D=320, H=4, lengths=PACKED_DIFFERENT, mask=causal)
    yield replace(a, name="wide varlen bf16, rows that no sequence owns", lengths=PACKED_ZERO, unowned=(9, 40),
                  dtype=bf16)  # fmt: skip
    yield replace(a, name="wide precision ieee, bias", precision="ieee", score=(bias("HMN"),), mask=causal)
    yield replace(a, name="wide precision ieee, dropout, D_v", precision="ieee", D_v=320, dropout=0.2)
    yield replace(a, name="wide strides sliced bf16", D=511, dtype=bf16, strides="sliced", mask=causal)
    yield replace(a, name="wide qkvpacked", M=40, N=40, D=320, strides="qkvpacked", mask=causal)
    yield replace(a, name="wide fp64", D=320, dtype=fp64, mask=causal)
    yield replace(a, name="wide through lse, bf16", dtype=bf16, loss="lse")
    yield replace(a, name="wide NaN in k", values="NaN in k", M=9, N=9, loss="o")
    yield replace(a, name="wide large values bf16", values="large", dtype=bf16, mask=causal)
    a = replace(a, size="large", H=4)
    for dtype in (fp16, bf16, fp32):
        yield replace(a, name=f"large wide {_name(dtype)} D 512", dtype=dtype, M=300, N=420, mask=causal)
        yield replace(a, name=f"large wide {_name(dtype)} D 320, full", dtype=dtype, M=257, N=257, D=320)


def _lengths() -> Iterator[Case]:
    for L in (1, 17, 33, 53, 63, 65, 127, 129):
        yield Case(f"length {L}", B=1, H=1, H_k=1, M=L, N=L, loss="o")
        yield Case(f"length {L} causal", B=1, H=1, H_k=1, M=L, N=L, mask=causal)
    for M, N in ((17, 53), (53, 17), (1, 65), (65, 1), (1, 1), (64, 65), (65, 64)):
        for name in ("causal", "window", "prefix"):
            yield Case(f"{M} x {N} {name}", B=1, M=M, N=N, mask=MASKS[name])
    yield Case("65 x 1 full", M=65, N=1)
    yield Case("1 x 65 full", M=1, N=65)
    yield Case("rows without keys: window", M=53, N=17, mask=window(4, 0), loss="both")
    yield Case(
        "rows without keys: documents", mask=lambda d: tw.Documents(d.integers(3, d.B, d.M), d.integers(1, d.B, d.N))
    )
    yield Case("rows without keys: dense", mask=lambda d: tw.Dense(d.bools(d.M, 1)))
    yield Case("rows without keys: dropout", M=53, N=17, mask=causal, dropout=0.2)
    yield Case("rows without keys: scores", M=53, N=17, mask=causal, score=(softcap(), alibi(), bias()))
    yield Case("rows without keys: bf16", M=53, N=17, mask=causal, dtype=bf16)
    for name, sizes in (("batch", {"B": 0}), ("queries", {"M": 0}), ("keys", {"N": 0}), ("lengths", {"M": 0, "N": 0})):
        yield Case(f"no {name}", **sizes)
        yield Case(f"no {name}, causal", **sizes, mask=causal)
        yield Case(f"no {name}, sink, bias, dropout", **sizes, sink=fp32, score=(bias("HMN"),), dropout=0.1)
        yield Case(f"no {name}, dense", **sizes, mask=dense())


def _varlen() -> Iterator[Case]:
    for name, lengths in (("", PACKED), (" with zeros", PACKED_ZERO), (" M != N", PACKED_DIFFERENT)):
        yield Case(f"varlen{name}", lengths=lengths)
        for mask in ("causal", "window", "prefix", "padding"):
            yield Case(f"varlen{name}, {mask}", lengths=lengths, mask=MASKS[mask])
        yield Case(f"varlen{name}, sink, softcap, alibi", lengths=lengths, score=(softcap(), alibi()), sink=fp32)
        yield Case(f"varlen{name}, dropout", lengths=lengths, dropout=0.2, mask=causal)
    yield Case("varlen, causal & window & padding", lengths=PACKED_DIFFERENT, mask=both(causal, window(9, 0), padding))
    yield Case("varlen, padding-range & causal", lengths=PACKED_DIFFERENT, mask=both(padding_range, causal))
    yield Case("varlen, alibi per sequence", lengths=PACKED, score=(alibi("BH"),), mask=causal)
    yield Case("varlen, GQA", lengths=PACKED_DIFFERENT, H=4, mask=causal)
    yield Case("varlen, MQA, D_v, bf16", lengths=PACKED_DIFFERENT, H=4, H_k=1, D_v=40, dtype=bf16, mask=causal)
    yield Case("varlen, fp16", lengths=PACKED, dtype=fp16)
    yield Case("varlen, one sequence", lengths=((40, 40),), mask=causal)
    for B, lengths in enumerate((PACKED_ZERO, PACKED_DIFFERENT)):
        shared = Case("rows that no sequence owns", lengths=lengths, unowned=((9, 40), (100, 0))[B], H=4)
        yield replace(shared, name=f"varlen, {shared.name}, {B}")
        yield replace(shared, name=f"varlen, {shared.name}, sink, dropout {B}", sink=fp32, dropout=0.2, mask=causal)
        yield replace(shared, name=f"varlen, {shared.name}, bf16, D_v {B}", dtype=bf16, D_v=40, mask=window(9, 0))
        yield replace(shared, name=f"varlen, deterministic, {shared.name}, {B}", deterministic=True, loss="lse")
    yield Case("varlen, rows that no sequence owns, qkvpacked", lengths=tuple((n, n) for n, _ in PACKED),
               unowned=(20, 20), strides="qkvpacked", loss="o")  # fmt: skip
    for name, lengths in (("sequences", ()), ("queries", ((0, 9), (0, 3))), ("keys", ((9, 0), (3, 0)))):
        yield Case(f"varlen, no {name}, rows that none owns", lengths=lengths, unowned=(20, 5), sink=fp32)
    yield Case("varlen, no sequences", lengths=())
    yield Case("varlen, only empty sequences", lengths=((0, 0), (0, 0)))
    yield Case("varlen, no queries", lengths=((0, 9), (0, 3)), sink=fp32)
    yield Case("varlen, no keys", lengths=((9, 0), (3, 0)), sink=fp32)
    yield Case("varlen, through lse", lengths=PACKED_DIFFERENT, loss="lse")
    yield Case("varlen, through o", lengths=PACKED, loss="o", mask=causal)
    for strides in ("heads_first", "sliced", "every_second", "packed"):
        yield Case(f"varlen, {strides}", lengths=PACKED, strides=strides, mask=causal)
    yield Case("varlen, qkvpacked", lengths=tuple((n, n) for n, _ in PACKED), strides="qkvpacked", mask=causal)


def _strides() -> Iterator[Case]:
    for strides in ("packed", *STRIDES):
        yield Case(f"strides {strides}", M=40, N=40, strides=strides, mask=causal)
    yield Case("qkvpacked", M=40, N=40, strides="qkvpacked", mask=causal)
    yield Case("qkvpacked, odd sizes", M=37, N=37, H=3, D=13, strides="qkvpacked", loss="o")
    yield Case("qkvpacked bf16", M=40, N=40, D=64, strides="qkvpacked", dtype=bf16, mask=causal)
    yield Case("qkvpacked, bias, sink, dropout", M=40, N=40, strides="qkvpacked", score=(bias("HMN"),), sink=fp32,
               dropout=0.3)  # fmt: skip
    yield Case("strides heads_first bf16", strides="heads_first", dtype=bf16, D=64)
    yield Case("strides sliced fp16", strides="sliced", dtype=fp16, D=64)
    yield Case("strides sliced full", M=40, N=40, strides="sliced")
    yield Case("strides every_second, GQA, D_v", strides="every_second", H=4, D_v=24)


def _numbers() -> Iterator[Case]:
    for loss in ("o", "lse"):
        yield Case(f"through {loss}", loss=loss)
        yield Case(f"through {loss}, causal bf16", loss=loss, dtype=bf16, mask=causal)
        yield Case(f"through {loss}, scores, sink", loss=loss, score=(softcap(), bias()), sink=fp32)
        yield Case(f"through {loss}, dropout", loss=loss, dropout=0.3)
    for scale in (0.0, 0.05, 1.0):
        yield Case(f"scale {scale}", scale=scale, mask=causal)
        yield Case(f"scale {scale} bf16", dtype=bf16, scale=scale)
    yield Case("scale 0, bias, softcap", scale=0.0, score=(bias(), softcap()))
    for dtype in (fp16, bf16, fp32, fp64):
        yield Case(f"{_name(dtype)} full", dtype=dtype, D=32)
        yield Case(f"{_name(dtype)} causal", dtype=dtype, D=32, M=64, N=64, mask=causal)
        yield Case(f"{_name(dtype)} scores", dtype=dtype, D=32, score=(softcap(), alibi(), bias("HMN")), mask=causal)
    yield Case("fp64 sink, dropout", dtype=fp64, sink=fp64, dropout=0.2)
    for values in ("large", "small", "shifted", "zero"):
        yield Case(f"{values} values", values=values)
    yield Case("large values, causal & window", values="large", mask=both(causal, window(9, 0)))
    yield Case("shifted values bf16", values="shifted", dtype=bf16)
    for values in VALUES:
        if "in" in values.split():
            yield Case(values, values=values, D=8)
            yield Case(f"{values}, GQA", values=values, D=8, H=4, loss="o")
            yield Case(f"{values}, few keys", values=values, M=5, N=7, loss="o")
            yield Case(f"{values}, fp16", values=values, dtype=fp16)
    for precision in ("ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3", "tf32"):
        yield Case(f"precision {precision}", precision=precision, D=64, mask=causal)
    for D in (128, 256):  # where its pieces need separate tiles
        yield Case(f"precision tf32x3, head size {D}", precision="tf32x3", D=D, mask=causal)
    units = {"precision": "ieee", "H": 4}  # in Triton's interpreter these alone take the kernels' way for FMA units
    yield Case("precision ieee, GQA, alibi, bias, sink", **units, score=(alibi(), bias("HMN")), sink=fp32)
    yield Case("precision ieee, varlen, GQA, D_v", **units, lengths=PACKED_DIFFERENT, D_v=40, mask=causal)
    yield Case("precision ieee, dropout, window", **units, dropout=0.2, mask=both(causal, window(9, 0)), D=40)
    for name in ("full", "causal", "dense"):
        yield Case(f"deterministic {name}", deterministic=True, mask=MASKS.get(name, lambda d: tw.Full()), M=64, N=64)
    yield Case("deterministic GQA bf16", deterministic=True, H=4, dtype=bf16, M=64, N=64, mask=causal)
    yield Case("deterministic varlen", deterministic=True, lengths=PACKED_DIFFERENT, mask=causal)


def _large() -> Iterator[Case]:
    """For GPUs, whose tiles are larger than the tiny cases, and for the CPU's."""
    a = Case("", size="large", B=1, H=2, H_k=2, D=64)
    for dtype in (fp16, bf16, fp32):
        name = _name(dtype)
        yield replace(a, name=f"large {name} full", dtype=dtype, M=577, N=577)
        yield replace(a, name=f"large {name} causal", dtype=dtype, M=1024, N=1024, mask=causal)
        yield replace(a, name=f"large {name} D 128 causal", dtype=dtype, M=512, N=700, D=128, mask=causal)
        yield replace(a, name=f"large {name} D 256", dtype=dtype, M=300, N=400, D=256)
        yield replace(a, name=f"large {name} GQA", dtype=dtype, M=500, N=500, H=6, mask=causal)
    yield replace(a, name="large GQA D 128", dtype=bf16, M=600, N=600, H=8, H_k=2, D=128, mask=causal)
    yield replace(a, name="large MQA D 128", dtype=bf16, M=1200, N=1200, H=8, H_k=1, D=128, mask=causal)
    shared = replace(a, dtype=bf16, M=300, N=300, H=16, H_k=1)  # in the backward, several loops share keys
    for D in (64, 128, 256):
        yield replace(shared, name=f"large MQA D {D}, ragged", D=D, N=330, mask=causal)
    yield replace(shared, name="large MQA documents", mask=documents)
    yield replace(shared, name="large MQA M < N, window", dtype=fp32, N=400, D=128, mask=window(200, 0))
    yield replace(shared, name="large MQA D_v, bf16x6", dtype=fp32, D_v=40, mask=causal, precision="bf16x6")
    yield replace(shared, name="large MQA dropout, scores", D=128, dropout=0.1, score=(softcap(50.0),), mask=causal)
    yield replace(shared, name="large MQA deterministic", D=128, mask=causal, deterministic=True)
    yield replace(shared, name="large MQA varlen", D=128, lengths=PACKED_LONG, mask=causal)
    for D in (64, 128, 256):  # the diagonal meets tiles in their corners, once for every head of a program
        yield replace(a, name=f"large GQA D {D} aligned", dtype=bf16, M=512, N=512, H=6, D=D, mask=causal)
        yield replace(a, name=f"large GQA D {D}, blocks", dtype=bf16, M=800, N=800, H=8, D=D, mask=_blocks_by_head)
    yield replace(a, name="large long", dtype=bf16, M=2000, N=2000, H=1, H_k=1, mask=causal)
    yield replace(a, name="large long fp32", M=400, N=2000, H=1, H_k=1)
    yield replace(a, name="large window", M=1000, N=1000, mask=window(130, 0))
    yield replace(a, name="large window open", M=700, N=900, mask=window(None, 200))
    yield replace(a, name="large prefix", B=2, M=600, N=600, mask=prefix)
    yield replace(a, name="large padding", B=3, M=300, N=700, mask=padding)
    yield replace(a, name="large documents", B=2, M=900, N=900, mask=documents)
    yield replace(a, name="large documents & causal bf16", M=900, N=900, dtype=bf16, mask=both(documents, causal))
    yield replace(a, name="large dense", M=400, N=600, mask=dense())
    yield replace(a, name="large sparse dense", M=800, N=800, mask=_blocks)
    yield replace(a, name="large prefix & window & dense", M=600, N=600, mask=both(prefix, window(300, 300), _blocks))
    yield replace(a, name="large scores", M=400, N=500, score=(softcap(), alibi(), bias("HMN")), mask=causal, sink=fp32)
    yield replace(a, name="large bias of one row", B=2, M=500, N=500, score=(bias("N"),))
    yield replace(a, name="large dropout", B=2, M=400, N=500, dropout=0.1, mask=causal)
    yield replace(a, name="large dropout bf16", M=700, N=700, dropout=0.25, dtype=bf16)
    for D in (128, 256):
        yield replace(a, name=f"large dropout D {D}", D=D, M=300, N=300, dropout=0.1, dtype=bf16, mask=causal)
        yield replace(
            a, name=f"large scores D {D}", D=D, M=300, N=300, score=(softcap(), alibi()), dtype=bf16, mask=causal
        )
        yield replace(a, name=f"large softcap D {D}", D=D, M=300, N=300, score=(softcap(),), dtype=bf16, mask=causal)
    # more tiles than a card has processors, so that programs work on several
    yield replace(a, name="large many matrices", B=10, H=8, H_k=8, M=260, N=260, dtype=bf16, mask=causal)
    yield replace(a, name="large many matrices D 128", B=10, H=8, H_k=8, D=128, M=260, N=260, dtype=bf16, mask=causal)
    yield replace(a, name="large varlen", lengths=((300, 300), (0, 0), (700, 700), (65, 65)), mask=causal)
    yield replace(a, name="large varlen, rows that no sequence owns", lengths=((300, 500), (0, 1)), unowned=(9000, 700))
    yield replace(
        a, name="large varlen bf16 M != N", lengths=((300, 500), (1, 700), (200, 60)), dtype=bf16, mask=causal
    )
    yield replace(a, name="large varlen dropout", lengths=((300, 300), (129, 129)), dropout=0.2, sink=fp32)
    yield replace(a, name="large decode", B=3, M=1, N=1500, H=8, mask=causal)
    yield replace(a, name="large M>N", M=900, N=300, mask=causal)
    yield replace(a, name="large packed", M=500, N=500, strides="packed", dtype=fp16, mask=causal)
    yield replace(a, name="large qkvpacked", M=500, N=500, strides="qkvpacked", dtype=bf16, mask=causal)
    yield replace(a, name="large D 72", M=300, N=300, D=72, D_v=40, dtype=bf16, mask=causal)


def _fp16_sums() -> Iterator[Case]:
    """Sums so long that adding them up in fp16 would show."""
    a = Case("", size="large", B=1, M=64, N=64, D=64, dtype=fp16, loss="o")
    yield replace(a, name="large fp16 many queries", M=16384)
    yield replace(a, name="large fp16 many keys", M=16, N=16384)
    yield replace(a, name="large fp16 many heads", H=64, H_k=1, mask=causal)


def _eight_bits() -> Iterator[Case]:
    """In 8 bits; "large" has several blocks of queries and keys."""
    for precision in ("int8", "fp8"):
        of = {"dtype": bf16, "precision": precision}
        yield Case(f"{precision} full", **of)
        yield Case(f"{precision} fp16", **of | {"dtype": fp16}, mask=causal, D=64)
        for name in ("causal", "window", "padding", "documents", "dense"):
            yield Case(f"{precision} {name}", mask=MASKS[name], **of)
        for name, build in SCORES.items():
            yield Case(f"{precision} {name}", score=(build,), mask=causal, **of)
        yield Case(f"{precision} sink", sink=fp32, mask=causal, **of)
        yield Case(f"{precision} GQA", H=4, D=40, D_v=64, **of)
        yield Case(f"{precision} through lse", loss="lse", **of)
        yield Case(f"{precision} shifted", values="shifted", **of)
        yield Case(f"{precision} zero", values="zero", **of)
        yield Case(f"{precision} qkvpacked", N=33, strides="qkvpacked", **of)
        yield Case(f"{precision} varlen", lengths=PACKED_ZERO, unowned=(3, 2), **of)
        for D in (64, 128, 256):
            large = {"M": 300, "N": 700, "H": 4, "D": D, "size": "large", **of}
            yield Case(f"{precision} large {D}", **large)
            yield Case(f"{precision} large {D} causal", mask=causal, **large)
            yield Case(f"{precision} large {D} window", mask=window(90, 30), sink=fp32, **large)
            yield Case(f"{precision} large {D} softcap", mask=causal, score=(softcap(20.0),), **large)
            yield Case(f"{precision} large {D} varlen", mask=causal, lengths=PACKED_LONG, **large)
    yield Case("int8 dropout", dropout=0.3, mask=causal, dtype=bf16, precision="int8")


def _short() -> Iterator[Case]:
    """More short batch entries and packed sequences than the CPU computes together."""
    short = Case("", size="large", B=150, M=5, N=7, H=4, D=8)
    for dtype in (fp16, bf16, fp32):
        yield replace(short, name=f"large {_name(dtype)} many short", dtype=dtype, mask=causal)
    yield replace(short, name="large many short, masks", mask=both(prefix, padding, documents_mixed, dense()))
    scores = (softcap(), alibi("BH"), bias("BHMN"), bias("HM1"))
    yield replace(short, name="large many short, scores", score=scores, sink=fp32, dropout=0.2)
    lengths = ((3, 5),) * 140 + ((5, 3),) * 2 + ((0, 4), (6, 6), (2, 0)) + ((6, 6),) * 40
    yield replace(short, name="large varlen short", lengths=lengths, mask=both(causal, padding), dropout=0.2)
    yield replace(short, name="large varlen short, scores", lengths=lengths, score=(softcap(), alibi("BH")), sink=fp32)


def _blocks(draw: Draw, *heads: int) -> tw.Mask:
    """A block-sparse mask: empty, full and partial tiles, others in each head."""
    sizes = *heads, -(-draw.M // 128), -(-draw.N // 128)
    coarse = draw.bools(*sizes) & draw.bools(*sizes)
    fine = coarse.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : draw.M, : draw.N]
    return tw.Dense(fine & (torch.arange(draw.N, device=draw.device) % 300 != 7))


def _blocks_by_head(draw: Draw) -> tw.Mask:
    return _blocks(draw, draw.case.H)


def _name(dtype: torch.dtype) -> str:
    return {fp16: "fp16", bf16: "bf16", fp32: "fp32", fp64: "fp64"}[dtype]


CASES = [
    *_masks(),
    *_scores(),
    *_sink_and_dropout(),
    *_heads(),
    *_wide(),
    *_lengths(),
    *_varlen(),
    *_strides(),
    *_numbers(),
    *_large(),
    *_fp16_sums(),
    *_eight_bits(),
    *_short(),
]
