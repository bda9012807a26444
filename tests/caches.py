"""Calls whose keys are in a cache, and what the reference gives for them, for tests here and on a GPU.

Whatever a call must not read is poison: rows that no sequence has are NaN, and entries of the table that no query needs
are no page at all.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from conformance.rule import of_sequence
from torch import Tensor

import tilewise as tw
from tilewise.attention import reference
from tilewise.values.masks import intersect

NO_PAGE = 1 << 30
CAUSAL = tw.Causal()


@dataclass(frozen=True)
class Case:
    """What a test varies; see `Cached` for the layout's part."""

    name: str
    queries: tuple[int, ...] = (1, 1, 1)
    lengths: tuple[int, ...] = (70, 1, 200)
    starts: tuple[int, ...] | None = None
    index: tuple[int, ...] | None = None
    packed: bool = False
    unowned: int = 0
    page: int | None = 16
    capacity: int = 256
    H: int = 8
    H_k: int = 2
    D: int = 32
    D_v: int = 32
    mask: Any = CAUSAL
    score: Any = ()
    sink: bool = False
    scale: float | None = None
    invariant: int = 0
    dtype: torch.dtype = torch.float32
    order: str = "NHD"
    latent: bool = False
    """Whether v is k's first columns."""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("one query, pages of 16"),
    Case("one query, contiguous", page=None),
    Case("pages of 1", page=1, capacity=210),
    Case("pages of 8, full", page=8, mask=tw.Full()),
    Case("pages of 48", page=48, capacity=240),
    Case("pages of 64", page=64, lengths=(63, 64, 65)),
    Case("pages of 128", page=128, lengths=(127, 128, 256)),
    Case("pages of 256", page=256, lengths=(0, 255, 256)),
    Case("lengths at the edges of pages", queries=(1,) * 6, lengths=(0, 1, 15, 16, 17, 256)),
    Case("lengths above the capacity are cut", lengths=(300, 256, 1000), capacity=256),
    Case("heads first", order="HND"),
    Case("k and v interleaved", order="KV"),
    Case("shared entries", index=(2, 0, 2), lengths=(70, 100, 33)),
    Case("shared contiguous entries", index=(1, 1, 0), page=None),
    Case("padded on the left", starts=(3, 0, 100), lengths=(70, 1, 200)),
    Case("padded on the left, contiguous, shared", starts=(3, 0, 101), index=(0, 1, 0), page=None),
    Case("nothing but padding", starts=(70, 1, 300), lengths=(70, 1, 200)),
    Case("several queries", queries=(5, 5, 5)),
    Case("more queries than keys", queries=(7, 7), lengths=(3, 60), H=4),
    Case("packed mixture", queries=(1, 21, 0, 3), lengths=(157, 100, 9, 3), packed=True, unowned=5, sink=True),
    Case("packed, contiguous, window", queries=(5, 1, 17), lengths=(200, 90, 130), packed=True, page=None, H_k=1,
         mask=tw.Causal() & tw.Window(37, 0)),
    Case("window", queries=(2, 2, 2), mask=tw.Window(20, 5), lengths=(90, 50, 200)),
    Case("window to the left", mask=tw.Window(40, 0)),
    Case("window wider than the keys", mask=tw.Window(1000, None)),
    Case("soft cap, sink", queries=(4, 4), lengths=(150, 2), H=6, score=tw.SoftCap(5.0), sink=True),
    Case("alibi", queries=(3, 3), lengths=(100, 60), score="alibi"),
    Case("alibi per sequence", queries=(3, 3), lengths=(100, 60), score="alibi by sequence"),
    Case("prefix", queries=(9, 9), lengths=(100, 60), mask="prefix"),
    Case("padding", queries=(9, 9), lengths=(100, 60), mask="padding"),
    Case("scale of 0", scale=0.0),
    Case("MHA", H=2, H_k=2),
    Case("groups of 3", H=6, queries=(3, 3, 3)),
    Case("MQA of 16", H=16, H_k=1),
    Case("MQA of 64", H=64, H_k=1),
    Case("head size 40 and 24", D=40, D_v=24),
    Case("head size 80", D=80, D_v=80),
    Case("head size 96 and 128", D=96, D_v=128),
    Case("head size 192 and 128", D=192, D_v=128),
    Case("head size 256", D=256, D_v=256, H=4, lengths=(70, 1, 90)),
    Case("fp16", dtype=torch.float16),
    Case("bf16", dtype=torch.bfloat16, score=tw.SoftCap(5.0)),
    Case("invariant", invariant=64, queries=(1, 9, 2), lengths=(70, 9, 200), packed=True),
    Case("invariant, window", invariant=64, queries=(1, 9, 2), lengths=(70, 9, 200), packed=True,
         mask=tw.Causal() & tw.Window(70, 0)),
    Case("many sequences", queries=(1,) * 65, lengths=tuple(range(65)), H=2, H_k=1),
]  # fmt: skip


LATENT = Case("latents", H=16, H_k=1, D=576, D_v=512, latent=True)
LATENTS = [
    LATENT,
    replace(LATENT, name="latents, contiguous", page=None),
    replace(LATENT, name="latents, 128 heads", H=128, queries=(2, 2), lengths=(70, 1), page=64),
    replace(LATENT, name="latents, four queries, window", queries=(4,) * 3, mask=tw.Causal() & tw.Window(50, 0)),
    replace(LATENT, name="latents, soft cap, sink", score=tw.SoftCap(5.0), sink=True, page=8),
    replace(LATENT, name="latents, alibi, shared entries", score="alibi", index=(2, 0, 2), lengths=(70, 100, 33)),
    replace(LATENT, name="latents, padded on the left", starts=(3, 0, 100), page=None),
    replace(LATENT, name="latents, packed", queries=(1, 9, 2), lengths=(70, 9, 200), packed=True, unowned=3),
    replace(LATENT, name="latents, invariant", queries=(1, 9, 2), lengths=(70, 9, 200), packed=True, invariant=64),
    replace(LATENT, name="latents, heads first, of two heads", order="HND", H_k=2),
    replace(LATENT, name="a prompt of latents", queries=(70,), lengths=(90,)),
    replace(LATENT, name="latents, v apart", latent=False),
    replace(LATENT, name="latents, v apart, contiguous", latent=False, page=None),
    replace(LATENT, name="k is v", D=512, H=8),
    replace(LATENT, name="head size 320", D=320, D_v=320, latent=False, H_k=2),
    replace(LATENT, name="head size 530 and 60", D=530, D_v=60),
    replace(LATENT, name="head size 64 and 500", D=64, D_v=500, latent=False),
]
"""Head sizes above 256, most with v in k's memory; a GPU takes them by name."""


@dataclass
class Call:
    """Tensors of a case: `attention(q, k, v, **options)`."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: tw.Cached
    options: dict[str, Any]


def make(case: Case, device: str = "cpu", seed: int = 0) -> Call:
    """Draw a case's tensors, with poison where nothing may be read."""
    draw = torch.Generator().manual_seed(seed)
    B, entries = len(case.queries), max(case.index or (), default=len(case.queries) - 1) + 1
    starts, lengths = case.starts or (0,) * B, torch.tensor(case.lengths)
    M = case.queries[0]
    shape = (sum(case.queries) + case.unowned,) if case.packed else (B, M)
    q = torch.randn(*shape, case.H, case.D, generator=draw)
    mask, score = _values(case, draw)
    used = torch.zeros(entries, case.capacity, dtype=torch.bool)
    needed = torch.zeros(entries, case.capacity, dtype=torch.bool)
    for b, (start, length) in enumerate(zip(starts, lengths.clamp(max=case.capacity).tolist(), strict=True)):
        entry = case.index[b] if case.index else b
        N, m = max(0, length - start), case.queries[b]
        seen = (
            mask.dense(m, N).expand(-1, -1, m, N)[b if mask.parts and mask.parts[0].captures else 0].any(0).any(0)
            if mask.dense(m, N).ndim == 4
            else mask.dense(m, N).any(0)
        )
        used[entry, start : start + N] = True
        needed[entry, start : start + N] |= seen
    table, P = None, case.page
    if P is not None:
        width = case.capacity // P
        table = torch.randperm(entries * width + 3, generator=draw)[: entries * width].view(entries, width).int()
    k, v = (_cache(case, size, table, used if table is None else needed, draw) for size in (case.D, case.D_v))
    if case.order == "KV":
        pairs = torch.stack([torch.nn.functional.pad(t, (0, max(case.D, case.D_v) - t.shape[-1])) for t in (k, v)], 2)
        k, v = pairs[:, :, 0, :, : case.D], pairs[:, :, 1, :, : case.D_v]
    if table is not None:
        table[~needed.view(entries, -1, P).any(-1)] = NO_PAGE
    cu_q = torch.tensor((0, *case.queries)).cumsum(0) if case.packed else None
    layout = tw.Cached(
        lengths, table, starts=torch.tensor(case.starts) if case.starts else None, cu_q=cu_q,
        max_q=max(case.queries) if case.packed else None, invariant=case.invariant,
        index=torch.tensor(case.index) if case.index else None,
    )  # fmt: skip
    sink = torch.randn(case.H, generator=draw).to(device) if case.sink else None
    score = tuple(change.to(device) for change in score)
    options = {"mask": mask.to(device), "score": score, "sink": sink, "scale": case.scale}
    q, k, v = (t.to(case.dtype).to(device) for t in (q, k, v))
    if case.latent:  # only now: what is copied to a device has memory of its own
        v = k[..., : case.D_v]
    return Call(q, k, v, layout.to(device), options)


def _values(case: Case, draw: torch.Generator) -> tuple[tw.Mask, tuple[tw.Score, ...]]:
    """Return a case's mask and scores with their tensors."""
    N = torch.tensor([max(0, n - s) for n, s in zip(case.lengths, case.starts or (0,) * 99, strict=False)])
    mask = case.mask
    if mask == "prefix":
        mask = tw.Prefix(N // 2)
    elif mask == "padding":
        mask = tw.Padding(N - 5)
    score = (case.score,) if isinstance(case.score, tw.Score) else ()
    if str(case.score).startswith("alibi"):
        by_sequence = (len(case.queries),) if "sequence" in case.score else ()
        score = (tw.Alibi(torch.rand(*by_sequence, case.H, generator=draw)),)
    return mask, score


def _cache(case: Case, size: int, table: Tensor | None, used: Tensor, draw: torch.Generator) -> Tensor:
    """Return a cache with numbers in rows that are used, NaN elsewhere."""
    shape = (*used.shape, case.H_k, size)
    rows = torch.randn(shape, generator=draw).masked_fill(~used[..., None, None], torch.nan)
    if table is not None:
        paged = torch.full((table.numel() + 3, case.page or 1, case.H_k, size), torch.nan)
        paged[table.flatten().long()] = rows.view(-1, case.page or 1, case.H_k, size)
        rows = paged
    return rows.transpose(1, 2).contiguous().transpose(1, 2) if case.order == "HND" else rows


def truth(call: Call) -> tuple[Tensor, Tensor]:
    """Return o and lse by the reference, in fp64, sequence by sequence; rows of no sequence are 0 and -inf."""
    layout, q = call.layout, call.q.double()
    if layout.table is not None:
        clean = layout.table.masked_fill(layout.table == NO_PAGE, 0)
        layout = tw.Cached(layout.lengths, clean, starts=layout.starts, cu_q=layout.cu_q, index=layout.index)
    packed = layout.cu_q is not None
    flat = q if packed else q.flatten(0, 1)
    o = q.new_zeros(*flat.shape[:2], call.v.shape[-1])
    lse = q.new_full((flat.shape[1], flat.shape[0]), -torch.inf)
    ends = layout.cu_q.tolist() if packed else [b * q.shape[1] for b in range(q.shape[0] + 1)]
    mask, score = call.options["mask"], call.options["score"]
    sink = call.options["sink"]
    for b in range(len(ends) - 1):
        rows = slice(ends[b], ends[b + 1])
        if rows.start < rows.stop:
            parts = intersect(tuple(of_sequence(part, b) for part in mask.parts))
            k, v = (reference.gather(t, b, layout).double().nan_to_num(0.0) for t in (call.k, call.v))
            changes = tuple(of_sequence(change, b) for change in score)
            got = reference.attention(flat[None, rows], k, v, mask=parts, score=changes, scale=call.options["scale"],
                                      sink=None if sink is None else sink.double())  # fmt: skip
            o[rows], lse[:, rows] = got[0][0], got[1][0]
    if packed:
        return o, lse
    return o.view(*q.shape[:3], -1), lse.view(-1, *q.shape[:2]).transpose(0, 1)


def errors(got: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the largest errors of o and lse, once rows without keys are found where the truth has them."""
    assert torch.equal(got[1] == -torch.inf, true[1] == -torch.inf)
    assert got[0].shape == true[0].shape
    finite = true[1] > -torch.inf
    of_lse = (got[1].double() - true[1])[finite].abs()
    return float((got[0].double() - true[0]).abs().max()), float(of_lse.max()) if of_lse.numel() else 0.0
