"""Suites: named cases, and how they are grouped."""

from dataclasses import dataclass, replace

import torch

from tilewise.values.intervals import Causal, Padding
from tilewise.values.masks import Full, Mask

from .variants import DOCUMENTS, PLAIN, SHAPES, VARIANTS, Variant, cut, visited

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
PRODUCTS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}
"""Arithmetic of a pass, in forwards: the backward does five products of the forward's size where it does two."""


@dataclass(frozen=True)
class Case:
    """Self-attention of `length` tokens: q, k, v (batch, length, heads, head_size), unless a variant says otherwise."""

    batch: int
    heads: int
    length: int
    head_size: int
    dtype: str
    causal: bool = False
    dropout: float = 0.0
    variant: str = ""
    """A name in VARIANTS or SHAPES, or plain attention."""

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        dropout = f" dropout {self.dropout}" if self.dropout else ""
        variant = f" {self.variant}" if self.variant else ""
        return f"{self.dtype} {mask}{variant or dropout} B{self.batch} H{self.heads} D{self.head_size} N{self.length}"

    @property
    def type(self) -> torch.dtype:
        """The torch type of q, k and v."""
        return TYPES[self.dtype]

    @property
    def varied(self) -> Variant:
        """Return the variant that the call asks for."""
        return (VARIANTS | SHAPES)[self.variant] if self.variant else PLAIN

    @property
    def mask(self) -> Mask:
        """Return the mask of the call."""
        return (Causal() if self.causal else Full()) & self.varied.mask

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the length of every sequence, without its padding."""
        if self.varied.packed:
            return cut(self.batch * self.length, self.varied.cuts)
        if self.varied.padded:
            return tuple(self.length * (b + 1) // self.batch for b in range(self.batch))
        return (self.length,) * self.batch

    def real(self, device: torch.device) -> torch.Tensor:
        """Return which tokens of a batch (B, N) are no padding."""
        ends = torch.tensor(self.lengths, device=device)
        return torch.arange(self.length, device=device) < ends[:, None]

    def padding(self, device: torch.device) -> Mask:
        """Return the mask of a padded batch."""
        return Padding(torch.tensor(self.lengths, dtype=torch.int32, device=device)) if self.varied.padded else Full()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of q: (batch, length, heads, head size), or (tokens, heads, head size) if packed."""
        rows = (sum(self.lengths),) if self.varied.packed else (self.batch, self.varied.queries or self.length)
        return *rows, self.heads, self.head_size

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Return the shape of o."""
        return *self.shape[:-1], self.varied.values or self.head_size

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Return the shape of v."""
        return *self.key_shape[:-1], self.varied.values or self.head_size

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Return the shape of k."""
        rows = (sum(self.lengths),) if self.varied.packed else (self.batch, self.length)
        return *rows, self.heads // self.varied.group, self.head_size

    @property
    def share(self) -> float:
        """Return the fraction of plain attention's tiles that the variant computes."""
        plain = replace(self, variant="")
        mine, theirs = (sum(visited(case.mask, length) for length in case.lengths) for case in (self, plain))
        return mine / theirs

    def flops(self, pass_: str) -> float:
        """Return 2 B H M N (D + D_v) for the forward, half of it if causal, and 2.5 times that for the backward.

        A variant counts its share.
        """
        queries, D_v = self.varied.queries or self.length, self.varied.values or self.head_size
        forward = 2.0 * self.batch * self.heads * queries * self.length * (self.head_size + D_v)
        return PRODUCTS[pass_] * forward * (0.5 if self.causal else 1.0) * (self.share if self.variant else 1.0)


@dataclass(frozen=True)
class Suite:
    """A question, the cases that answer it, and whom to compare with."""

    name: str
    title: str
    cases: tuple[Case, ...]
    passes: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    matmul: int
    """Rows and columns of the square matrix product that is measured with the cases."""
    quick_lengths: tuple[int, ...]
    sparse: tuple[str, tuple[int, ...]] = ("flex", (4096, 16384))
    """A peer that compiles for seconds at every shape, and the only lengths where that time is spent."""
    warm: float = 0.0
    """Seconds for which a contender runs before each of its samples. Where power limits the clock, it then runs at a
    clock of its own, and not at what the contender before left."""
    host: bool = True
    """Whether the host's cost of a call is measured as well."""
    tables: tuple[str, ...] = ("rate",)
    """What its first tables show: names of `tables.METRICS`."""
    devices: tuple[str, ...] = ("cuda",)
    beside: tuple[str, ...] = ()
    """Whom to compare with in cases that are a variant by themselves, if not `peers`."""

    def peers_of(self, case: Case) -> tuple[str, ...]:
        """Return who computes a case."""
        return self.beside if case.variant and self.beside else self.peers

    def quick(self) -> "Suite":
        """Return a fraction of the suite, for a first look."""
        cases = tuple(c for c in self.cases if c.length in self.quick_lengths)
        return replace(self, cases=cases, rounds=max(2, self.rounds // 2))


def _paper() -> tuple[Case, ...]:
    return tuple(
        Case(16384 // length, 2048 // head_size, length, head_size, "bf16", causal)
        for head_size in (64, 128, 256)
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    )


def _classic() -> tuple[Case, ...]:
    return tuple(
        Case(8, 12, length, 64, "fp16", causal, dropout)
        for causal, dropout in ((False, 0.0), (True, 0.1))
        for length in (128, 256, 512, 1024, 2048, 4096)
    )


def _long() -> tuple[Case, ...]:
    return tuple(
        Case(1, 2048 // head_size, length, head_size, "bf16", causal=True)
        for head_size in (64, 128)
        for length in (16384, 32768, 65536, 131072)
    )


def _cpu() -> tuple[Case, ...]:
    return tuple(
        Case(1, 8, length, 64, dtype, causal)
        for dtype in ("fp32", "bf16")
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096)
    )


def _short() -> tuple[Case, ...]:
    return tuple(
        Case(32768 // length, 1024 // head_size, length, head_size, "bf16", causal)
        for head_size in (64, 128)
        for causal in (False, True)
        for length in (32, 49, 64, 77, 128, 197, 256, 512)
    )


def _short_cpu() -> tuple[Case, ...]:
    return (
        Case(1024, 8, 4, 64, "fp32", causal=True, variant="GQA 4"),
        Case(1, 8, 32768, 64, "fp32", variant="GQA 4, one query"),
        *(Case(1, 4, 64, 64, dtype, variant="8 queries") for dtype in ("fp32", "bf16")),
        *(Case(1, 8, 1024, 64, dtype, variant="GQA 4") for dtype in ("fp32", "bf16")),
        *(Case(1, 8, 2048, 64, dtype, causal=True, variant="window 1024") for dtype in ("fp32", "bf16")),
    )


def _decode() -> tuple[Case, ...]:
    sizes = ((1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 4096), (8, 32768), (64, 8192))
    return tuple(Case(batch, 32, length, 128, "bf16", variant="GQA 4, one query") for batch, length in sizes)


def _prefill() -> tuple[Case, ...]:
    sizes = (8192, 32768)
    return tuple(Case(1, 32, length, 128, "bf16", causal=True, variant="GQA 4, 2048 queries") for length in sizes)


def _variants() -> tuple[Case, ...]:
    plain = tuple(Case(2, 16, 8192, 128, "bf16", causal) for causal in (True, False))
    documents = tuple(
        Case(1, 16, DOCUMENTS[-1], 64, "bf16", causal, variant="128 documents") for causal in (True, False)
    )
    return (
        *plain,
        *documents,
        Case(1, 16, DOCUMENTS[-1], 128, "bf16", causal=True, variant="128 documents"),
        Case(64, 16, 512, 64, "bf16", variant="padded"),
        Case(16, 16, 2048, 128, "bf16", causal=True, variant="padded"),
        Case(1, 16, 8192, 128, "bf16", causal=True, variant="window 128"),
        Case(1, 64, 8192, 64, "bf16", causal=True, variant="GQA 8, sink, window 128"),
    )


def _llmc() -> tuple[Case, ...]:
    of_source = tuple(Case(4, 12, length, 64, "fp32", causal=True) for length in (256, 1024, 2048, 4096))
    return of_source + tuple(replace(case, head_size=128) for case in of_source if case.length >= 1024)


def _eight_bits() -> tuple[Case, ...]:
    sizes = ((head_size, causal) for head_size in (64, 128, 256) for causal in (False, True))
    return tuple(
        Case(16384 // length, 2048 // head_size, length, head_size, "bf16", causal)
        for head_size, causal in sizes
        for length in ((1024, 2048, 4096, 16384) if head_size == 128 else (16384,))
    )


SDPA = ("sdpa cudnn", "sdpa flash", "sdpa efficient", "sdpa math")
PRECISE = tuple(f"tilewise {name}" for name in ("ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3", "tf32"))
PACKAGES = ("flash-attn 2", "flash-attn 3", "flash-attn 4")

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "paper", "FlashAttention-2's grid: 16k tokens, hidden size 2048", _paper(), (FORWARD, BACKWARD),
            ("tilewise", "tilewise triton", *SDPA, "flex", *PACKAGES, "standard"), 7, 8192, (1024, 4096),
        ),
        Suite(
            "classic", "FlashAttention 0.1's benchmark: batch 8, 12 heads of 64", _classic(), (BOTH,),
            ("tilewise", "standard", *SDPA[:3], *PACKAGES), 5, 8192, (512, 1024, 2048, 4096),
        ),
        Suite(
            "long", "16K to 128K tokens, hidden size 2048, causal", _long(), (FORWARD, BACKWARD),
            ("tilewise", *SDPA[:3], *PACKAGES, "standard"), 3, 8192, (16384, 65536),
        ),
        Suite(
            "short", "32 to 512 tokens, as in Swin, CLIP, BERT and ViT: 32k tokens, hidden size 1024", _short(),
            (FORWARD, BACKWARD), ("tilewise", "tilewise triton", "sdpa cudnn", "sdpa flash"), 5, 8192, (128, 256),
        ),
        Suite(
            "cpu", "8 heads of 64 on the CPU", _cpu(), (FORWARD, BOTH),
            ("tilewise", "tilewise tiled", "sdpa", "standard"), 7, 2048, (512, 2048), devices=("cpu",),
        ),
        Suite(
            "short-cpu", "1024 sequences of 4 tokens, few queries, shared key heads and windows, on the CPU",
            _short_cpu(), (FORWARD, BOTH),
            ("tilewise", "tilewise tiled", "sdpa"), 9, 2048, (4, 64), tables=("time",), devices=("cpu",),
        ),
        Suite(
            "llmc", "llm.c's GPT-2 in fp32: batch 4, 12 heads of 64, causal; and heads of 128",
            _llmc(), (FORWARD, BACKWARD),
            (*PRECISE, "sdpa efficient", "standard", "standard tf32"), 7, 8192, (256, 1024),
            tables=("time", "speedup", "efficient", "rate", "error"), devices=("cuda", "cpu"),
        ),
        Suite(
            "decode", "one query a sequence, 32 heads of 128 that share 8 key heads", _decode(), (FORWARD,),
            ("tilewise", "tilewise triton", "sdpa cudnn", "sdpa flash"), 7, 8192, (1024, 4096), tables=("time",),
        ),
        Suite(
            "prefill", "the last 2048 queries of a prompt, 32 heads of 128 that share 8 key heads", _prefill(),
            (FORWARD,),
            ("tilewise", "tilewise triton", "sdpa cudnn", "sdpa flash"), 7, 8192, (8192,), tables=("time",),
        ),
        Suite(
            "eight-bits", "8-bit products, with the launches that quantize q, k and v, and without: 16k tokens",
            _eight_bits(), (FORWARD,),
            ("tilewise", *(f"tilewise {name}{of}" for of in ("", " kernel") for name in ("int8", "fp8", "e4m3")),
             "sdpa cudnn"),
            5, 8192, (16384,), warm=0.5, host=False, tables=("rate", "eight-bits", "error"),
        ),
        Suite(
            "variants", "what each variant of a call costs", _variants(), (FORWARD, BACKWARD),
            ("tilewise", *VARIANTS), 7, 8192, (8192,), sparse=("", ()), host=False, tables=(),
            beside=("tilewise", "flex", "varlen_attn", "sdpa cudnn", "sdpa efficient"),
        ),
        Suite(
            "host", "what a call costs the thread that makes it, where nothing else runs",
            (Case(1, 16, 128, 128, "bf16", causal=True),), (FORWARD, BACKWARD),
            ("tilewise", "tilewise triton", "sdpa", "sdpa cudnn", "sdpa flash"), 3, 2048, (128,), tables=("host",),
        ),
    )
}  # fmt: skip
"""Every suite, by name; studies add theirs."""
