"""Tiles on the CPU: what masks hide is skipped, what they show whole has no mask, and only the rest is evaluated."""

import pytest
import torch
from program import masks
from program.test_bounds import visible

import tilewise as tw
from tilewise.call.calls import forget
from tilewise.cpu import tiled
from tilewise.cpu.backend import backend
from tilewise.program.bounds import Grid, tiles
from tilewise.values.of import MaskOf

B, H, H_K, D = masks.B, masks.H, 1, 8
LENGTHS = (300, 556), (33, 600)
MASKS = {lengths: masks.masks(max(lengths)) for lengths in LENGTHS}
NEEDLESS = ("block_diffusion",)
"""Masks whose bounds leave tiles open, all of whose entries are alike."""


@pytest.fixture(autouse=True)
def tiles_alone(monkeypatch):
    """Let no call run in PyTorch's kernel."""
    monkeypatch.setattr(backend, "fuse", False)
    forget()
    yield
    forget()


def operands(M, N):
    draw = torch.Generator().manual_seed(0)
    q, do = [torch.randn(B, M, H, D, generator=draw, requires_grad=True) for _ in range(2)]
    k, v = [torch.randn(B, N, H_K, D, generator=draw, requires_grad=True) for _ in range(2)]
    return q, k, v, do.detach()


def results(q, k, v, do, **options):
    o, lse = tw.attention(q, k, v, return_lse=True, **options)
    return [o, lse, *torch.autograd.grad(o, (q, k, v), do)]


def dense(q, k, v, seen):
    """Return plain attention in fp64; rows that see no key are 0."""
    q, k, v = [t.double().transpose(1, 2) for t in (q, k, v)]
    S = (q @ k.mT * D**-0.5).masked_fill(~seen, -torch.inf)
    lse = S.logsumexp(-1)
    P = torch.where(seen, torch.exp(S - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]), 0.0)
    return (P @ v).transpose(1, 2).float(), lse.float()


def agree(found, want):
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-4)


@pytest.fixture
def evaluated(monkeypatch):
    """Return a list of the entries of each tile that is evaluated."""
    calls, keep = [], MaskOf.keep

    def counted(self, at):
        calls.append(at)
        return keep(self, at)

    monkeypatch.setattr(MaskOf, "keep", counted)
    return calls


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS[LENGTHS[0]])
def test_tiles_that_are_open_are_evaluated_once_a_pass(name, lengths, evaluated):
    """The results are those of a dense mask, and `keep` is asked for tiles that are neither hidden nor whole."""
    M, N = lengths
    mask = tw.Mask.of(MASKS[lengths][name])
    q, k, v, do = operands(M, N)
    found = results(q, k, v, do, mask=mask)
    calls, evaluated[:] = list(evaluated), []
    seen = mask.dense(M, N, B, H).expand(B, H, M, N)
    o, lse = dense(q, k, v, seen)
    agree(found, [o, lse, *torch.autograd.grad(o, (q, k, v), do)])
    program, tensors, numbers, _ = mask.traced
    grid = Grid(B, H, M, N, 256, 256)
    some, every = visible(program, tensors, numbers, grid)
    possible, certain = [x.expand_as(some) for x in tiles(program, tensors, numbers, grid)]
    left, partial = [int((x.any(1) & ~y.all(1)).sum()) for x, y in ((possible, certain), (some, every))]
    assert len(calls) == 2 * left
    assert left == partial or name in NEEDLESS


@pytest.mark.parametrize("align", ["first", "last"])
@pytest.mark.parametrize("name", MASKS[LENGTHS[0]])
def test_packed_sequences_have_their_own_tiles(name, align, evaluated):
    """Each has its lengths and its shift; one has no query, one no key."""
    lengths = [(280, 280), (0, 40), (37, 0), (20, 300)]
    fn = masks.masks(300)[name]
    mask = tw.Mask.of(lambda b, h, i, j: fn(b // 2, h, torch.clamp(i, min=0), j), align=align)
    M, N = [sum(sizes) for sizes in zip(*lengths, strict=True)]
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = [
        torch.randn(n, h, D, generator=draw, requires_grad=True) for n, h in ((M, H), (N, 1), (N, 1), (M, H))
    ]
    cu_q, cu_k = [torch.tensor([0, *sizes]).cumsum(0).int() for sizes in zip(*lengths, strict=True)]
    found = results(q, k, v, do.detach(), mask=mask, layout=tw.Varlen(cu_q, cu_k))
    assert all([at.b.numel() == 1 and at.shift == lengths[int(at.b)][1] - lengths[int(at.b)][0] for at in evaluated])
    parts = []
    for b, (m, n) in enumerate(lengths):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        seen = mask.dense(m, n, len(lengths), H).expand(len(lengths), H, m, n)[b]
        parts.append(dense(q[None, rows], k[None, keys], v[None, keys], seen))
    o, lse = torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
    agree(found, [o, lse, *torch.autograd.grad(o, (q, k, v), do.detach())])


def test_intersections_skip_what_either_hides(evaluated):
    """Our own masks bound tiles, too: of a window and documents, tiles that both leave open are evaluated."""
    n = 1024
    doc = torch.arange(n) // 256
    q, k, v, do = operands(n, n)
    found = results(q, k, v, do, mask=tw.Mask.of(lambda b, h, i, j: doc[i] == doc[j]) & tw.Window(300, 0))
    assert len(evaluated) == 2 * B * 4
    i, j = torch.arange(n)[:, None], torch.arange(n)
    o, lse = dense(q, k, v, (doc[:, None] == doc) & (j <= i) & (i - j <= 300))
    agree(found, [o, lse, *torch.autograd.grad(o, (q, k, v), do)])


@pytest.mark.parametrize("make", [
    tw.Causal, lambda: tw.Window(100, 20), lambda: tw.Window(None, 0), lambda: tw.Prefix(torch.tensor([300, 9])),
    lambda: tw.Padding(torch.tensor([200, 560])), lambda: tw.Padding(torch.tensor([500, 560]), torch.tensor([20, 300])),
    lambda: tw.Padding(torch.arange(600) < torch.tensor([[200], [560]])),
    lambda: tw.Documents(torch.arange(520).expand(2, -1) // 200, torch.arange(600).expand(2, -1) // 256),
    lambda: tw.Spans((torch.arange(520).expand(2, -1) // 100).int() * 100, torch.arange(520).expand(2, -1).int() + 3),
    lambda: tw.Dense(torch.arange(600) // 256 != torch.arange(2)[:, None, None, None]),
    lambda: ~tw.Window(100, 20), lambda: tw.Causal() | tw.Padding(torch.tensor([200, 560])),
])  # fmt: skip
def test_our_own_masks_show_what_bounds_say(make, monkeypatch):
    """Of each tile, `_shown` says what a look at its entries says; none is left open needlessly."""
    M, N, mask = 520, 600, make()
    made = []
    shown = tiled._shown
    monkeypatch.setattr(tiled, "_shown", lambda p, s: made.append((s.b.start, shown(p, s))) or made[-1][1])
    q, k, v, do = operands(M, N)
    results(q, k, v, do, mask=mask)
    assert len(made) == 2 * B
    seen = mask.dense(M, N, B, H).expand(B, H, M, N)
    for b, rounds in made:
        for rows in rounds:
            for n, row in enumerate(rows):
                for m, what in enumerate(row):
                    tile = seen[b, :, n * 256 : n * 256 + 256, m * 256 : m * 256 + 256]
                    assert what == (tiled.WHOLE if tile.all() else tiled.OPEN if tile.any() else tiled.HIDDEN)
