"""The forward's roles, rehearsed on keys in a cache: every key comes from its page, and what no row sees is zeroed."""

import pytest
import torch
from hopper.calls import call
from hopper.rehearsal import rehearse_forward
from hopper.scenes import H
from hopper.test_forward_rehearsal import Reader, faults

import tilewise as tw
from tilewise.hopper.plan import FULL

FAR = 1 << 20
"""Between the first keys of two sequences, as the test counts them."""
GONE = 1 << 30
"""What the table holds where no query needs the page."""
LENGTHS, QUERIES, WIDTH = (700, 3, 0, 513), (200, 65, 5, 130), 768
MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "window": tw.Causal() & tw.Window(150, 0),
    "prefix": tw.Prefix(torch.tensor([100, 3, 0, 200])),
}


class CacheReader(Reader):
    """Events of a call whose keys are in a cache; `key_of` tells which sequence's row a row of a page is. `firsts`: the
    first query of each entry of q."""

    def __init__(self, sequences, tile, key_of, firsts):
        super().__init__(sequences, tile)
        self.key_of, self.firsts = key_of, firsts
        self.queries, self.zeros = {}, {}

    def tile_of(self, content):
        """The key head and the first key of a tile; no first key, -1, if it holds no key at all."""
        found = set()
        for (row, panel), (_, page, h_k, at, column) in content[1:] if content[0] == "parts" else [((0, 0), content)]:
            if column != 64 * panel:
                self.wrong.append(f"columns from {column} on lie in panel {panel}")
            if 0 <= page < GONE:  # TMA reads zeros elsewhere
                b, r = self.key_of(page, at)
                found.add((h_k, b * FAR + r - row))
        if len(found) > 1:
            self.wrong.append(f"one tile holds keys of {found}")
        return found.pop() if found else (0, -1)

    def product(self, role, left, _, right):
        (_, b, h, i, _), (h_k, j) = left, self.tile_of(right)
        if self.queries.get(role) != (h, self.firsts[b] + i):
            self.queries[role] = h, self.firsts[b] + i
            self.zeros.pop(role, None)
        if j >= 0:
            self.products[h, self.firsts[b] + i, j] += 1
            self.pairs.add((h, h_k))
        self.waiting[role].append((h_k, j))

    def weighed(self, role, right):
        h_k, j = self.tile_of(right)
        if self.waiting[role][:1] != [(h_k, j)] or not self.waiting[role].pop(0):
            self.wrong.append(f"V of key head {h_k} from key {j} on is another P's")
        h, i = self.queries[role]
        i -= 64 * role[1]  # the tile's first row, as this warpgroup's may lie after the sequence
        first, _, seen = next(each for each in reversed(self.sequences) if each[0] <= i)
        size, B_C = 64 * self.tile.WARPGROUPS, self.tile.B_C
        i0, live = i - first, torch.zeros(B_C, dtype=torch.bool)
        if j >= 0:
            own = seen[h, i0 : i0 + size, j % FAR : j % FAR + B_C].any(0)
            live[: len(own)] = own
        content, start, end = self.zeros.get(role, (right, 0, B_C))
        keys = torch.arange(B_C)
        kept = (keys >= start) & (keys < end) if content == right else torch.ones(B_C, dtype=torch.bool)
        if not torch.equal(kept, live):
            self.wrong.append(f"rows {i} of head {h} weigh other keys from {j} on than they see")

    def zeroed(self, role, content, first, end):
        """Rows of a tile of V, except those from `first` up to `end`."""
        self.zeros[role] = content, first, end

    def stored(self, _, name, b, h, row, column):
        super().stored(_, name, b, h, self.firsts[b] + row, column)


def rehearsed(mask, D, page, packed, programs=3, starts=None, max_q=None):
    """What goes wrong, held against the mask of each sequence written out; pages that no query needs are GONE."""
    draw = torch.Generator().manual_seed(0)
    queries = QUERIES if packed else (130,) * len(LENGTHS)
    sizes = [max(0, n - s) for n, s in zip(LENGTHS, starts or (0,) * len(LENGTHS), strict=True)]
    index = [3, 1, 0, 2]
    ends = torch.tensor([0, *queries]).cumsum(0)
    masks = []
    for b, (M, N) in enumerate(zip(queries, sizes, strict=True)):
        seen = mask.dense(M, N)
        masks.append((seen[b] if seen.ndim == 4 else seen).expand(H, M, N))
    table = keys = None
    if page:
        width = WIDTH // page
        table = torch.randperm(len(LENGTHS) * width, generator=draw).view(-1, width).int()
        places = {int(page): divmod(n, width) for n, page in enumerate(table.flatten())}
        for b, seen in enumerate(masks):
            for n in range(width):
                if not seen[..., n * page : (n + 1) * page].any():
                    table[index[b], n] = GONE
        keys = len(LENGTHS) * width, page
    layout = tw.Cached(
        torch.tensor(LENGTHS), table, index=torch.tensor(index), cu_q=ends if packed else None,
        starts=torch.tensor(starts) if starts else None, max_q=max_q,
    )  # fmt: skip
    batch = (sum(queries),) if packed else (len(queries), queries[0])
    p, x = call(batch[-1], 0, D, H, 2, batch=batch[:-1], keys=keys or (len(LENGTHS), WIDTH), mask=mask, layout=layout,
                backend="hopper")  # fmt: skip

    def key_of(at_page, row):
        if not page:
            b = index.index(at_page)
            return b, row - (starts[b] if starts else 0)
        entry, n = places[at_page]
        return index.index(entry), n * page + row

    found = rehearse_forward(p, x, torch.empty(0), programs, 2)
    firsts = ends.tolist()
    sequences = [(firsts[b], b * FAR, masks[b]) for b in range(len(queries))]
    reader = CacheReader(sequences, found.tile, key_of, firsts[:1] if packed else firsts)
    own = [each for each, M in zip(sequences, queries, strict=True) if not packed or M >= FULL]
    wrong = list(faults(found, 2, own, reader))
    left = {firsts[b] for b in range(len(queries))} - {first for first, _, _ in own}
    return found, wrong + [f"row {i} of head {h} is another kernel's" for h, i in reader.rows if i in left]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("page", [16, 48, 128, 256, None])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_every_key_comes_from_its_page(mask, D, page, packed):
    _, wrong = rehearsed(MASKS[mask], D, page, packed)
    assert not wrong


@pytest.mark.parametrize("programs", [1, 7])
def test_pages_of_8_among_other_numbers_of_programs(programs):
    _, wrong = rehearsed(MASKS["causal"], 128, 8, True, programs)
    assert not wrong


def test_max_q_bounds_nothing():
    _, wrong = rehearsed(MASKS["causal"], 128, 64, True, max_q=1)
    assert not wrong


def test_padded_on_the_left():
    _, wrong = rehearsed(MASKS["window"], 128, None, True, starts=(100, 3, 5, 1))
    assert not wrong
