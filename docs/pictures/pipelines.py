"""The roles of the Hopper kernels for `machine`: they start and wait as those in src/tilewise/hopper do."""

from collections.abc import Generator

from machine import ARITHMETIC, BYTES, EXPONENTIALS, Event, Machine, Role, Span, product

TMA, ADD, TENSOR, EXP, FMA = "TMA", "add_dq", "tensor cores", "exponentials", "arithmetic"
GROUPS = (0, 1)
ROWS = 64
"""Of queries or keys, a warpgroup's."""
STAGES = 2

Steps = Generator[Event, None, Event]
"""A part of a role that gives the task it ends with."""


def copy(rows: int, columns: int, size: int = 2) -> float:
    """Cycles of a tile's bytes."""
    return rows * columns * size / BYTES


class Pipeline:
    """A machine, and events under the names that the roles below use."""

    def __init__(self) -> None:
        self.m = Machine()

    def task(self, name: str, x: int, w: int | None = None) -> Event:
        """The end of a task of tile x."""
        return self.m.event(f"{name}({x})", w)

    def both(self, name: str, x: int) -> Event:
        """Both groups have arrived."""
        return self.m.event(f"{name} {x}", arrivals=len(GROUPS))


class Forward(Pipeline):
    """One tile of queries, two warpgroups, a row of key tiles.

    overlap     S of the next key tile and P V of this one run while exponentials do
    in_step     the groups wait for each other before products and before exponentials
    """

    def __init__(self, d: int, B_c: int, tiles: int, overlap: bool, in_step: bool) -> None:
        super().__init__()
        self.d, self.B_c, self.tiles, self.overlap, self.in_step = d, B_c, tiles, overlap, in_step

    def run(self) -> list[Span]:
        """When what runs."""
        return self.m.run(self.load(), *(self.attend(w) for w in GROUPS))

    def load(self) -> Role:
        """K one tile ahead of V: the order in which they are used."""
        size = copy(self.B_c, self.d)
        self.m.start(TMA, "Q", copy(ROWS * len(GROUPS), self.d))
        for y in range(self.tiles + 1):
            if y >= STAGES:
                yield self.both("empty", y - STAGES)
            if y < self.tiles:
                self.m.start(TMA, f"K({y})", size)
            if y > 0:
                self.m.start(TMA, f"V({y - 1})", size)

    def attend(self, w: int) -> Role:
        """A warpgroup."""
        yield self.m.event("Q")
        yield self.task("K", 0)
        S = self.start_s(w, 0)
        yield S
        self.m.arrive(self.both("empty", 0))
        P = yield from self.softmax(w, 0, S)
        for j in range(1, self.tiles):
            products = self.overlapped if self.overlap else self.one_by_one
            S = yield from products(w, j, P)
            P = yield from self.softmax(w, j, S)
            yield self.task("PV", j - 1, w)
            self.m.arrive(self.both("empty", j))
        yield self.task("V", self.tiles - 1)
        yield self.start_pv(w, self.tiles - 1, P)

    def start_s(self, w: int, j: int) -> Event:
        """S = Q K^T."""
        return self.m.start(TENSOR, f"S({j})", self.cycles(), w, [self.m.event("Q"), self.task("K", j)])

    def start_pv(self, w: int, j: int, P: Event) -> Event:
        """O += P V."""
        return self.m.start(TENSOR, f"PV({j})", self.cycles(), w, [P, self.task("V", j)])

    def cycles(self) -> float:
        """Of either product."""
        return product(ROWS, self.B_c, self.d)

    def softmax(self, w: int, j: int, S: Event) -> Steps:
        """P, of which only the exponentials are counted."""
        yield S
        yield from self.meet(f"S({j})")
        P = self.m.start(EXP, f"exp({j})", ROWS * self.B_c / EXPONENTIALS, w, [S])
        yield P
        yield from self.meet(f"P({j})")
        return P

    def overlapped(self, w: int, j: int, P: Event) -> Steps:
        """The kernel's loop: S of this tile, and behind it P V of the one before, whose end is not waited for."""
        yield self.task("K", j)
        if not self.in_step and (w, j) != (0, 1):
            yield self.m.event(f"turn {j}", w)
        S = self.start_s(w, j)
        yield from self.meet(f"S({j}) started")
        yield self.task("V", j - 1)
        self.start_pv(w, j - 1, P)
        if not self.in_step:
            self.m.arrive(self.m.event(f"turn {j + w}", 1 - w))
        return S

    def one_by_one(self, w: int, j: int, P: Event) -> Steps:
        """P V of the tile before, to its end; then S of this one."""
        yield self.task("V", j - 1)
        yield self.start_pv(w, j - 1, P)
        yield from self.meet(f"PV({j - 1})")
        yield self.task("K", j)
        return self.start_s(w, j)

    def meet(self, where: str) -> Role:
        """Both groups go on together, if they are in step."""
        if self.in_step:
            meeting = self.m.event(where, arrivals=len(GROUPS))
            self.m.arrive(meeting)
            yield meeting


class Backward(Pipeline):
    """One tile of keys, two groups of 64 of them (`rows_of_keys`), a row of query tiles."""

    def __init__(self, d: int, B_r: int, tiles: int) -> None:
        super().__init__()
        self.d, self.B_r, self.tiles = d, B_r, tiles

    def run(self) -> list[Span]:
        """When what runs."""
        return self.m.run(self.load(), self.add_dq(), *(self.rows_of_keys(w) for w in GROUPS))

    def load(self) -> Role:
        """K and V once, then Q and dO of every query tile."""
        self.m.start(TMA, "K, V", 2 * copy(ROWS * len(GROUPS), self.d))
        for y in range(self.tiles):
            for name in ("Q", "dO"):
                if y >= STAGES:
                    yield self.both(f"{name} empty", y - STAGES)
                self.m.start(TMA, f"{name}({y})", copy(self.B_r, self.d))

    def add_dq(self) -> Role:
        """Each group's piece, as it comes."""
        for y in range(self.tiles):
            for w in GROUPS:
                piece = self.m.event(f"piece {y}", w)
                yield piece
                self.m.start(ADD, f"add({y})", copy(64, 64, 4), w, [piece])
            for w in GROUPS:
                yield self.task("add", y, w)

    def rows_of_keys(self, w: int) -> Role:
        """64 keys."""
        yield self.m.event("K, V")
        for y in range(self.tiles):
            dS = yield from self.row_block(w, y)
            if y == 0:
                self.m.arrive(self.both("dS", 0))
            else:
                yield self.both("dS", y - 1)
                self.start_dq(w, y - 1)
            dK = self.multiply("dK", w, y, dS, self.task("Q", y))
            yield self.task("dV", y, w)
            if y > 0:
                yield self.task("dQ", y - 1, w)
                self.m.arrive(self.both("dS", y))
            self.m.arrive(self.both("dO empty", y))
            if y > 0:
                yield from self.hand_over(w, y - 1)
            yield dK
            self.m.arrive(self.both("Q empty", y))
        yield self.both("dS", self.tiles - 1)
        yield self.start_dq(w, self.tiles - 1)
        yield from self.hand_over(w, self.tiles - 1)

    def row_block(self, w: int, y: int) -> Steps:
        """S, dP, P and dS of one query tile; the product of dV is left running."""
        entries = ROWS * self.B_r
        keys, Q, dO = self.m.event("K, V"), self.task("Q", y), self.task("dO", y)
        yield Q
        S = self.multiply("S", w, y, keys, Q)
        yield dO
        dP = self.multiply("dP", w, y, keys, dO)
        yield S
        P = self.m.start(EXP, f"exp({y})", entries / EXPONENTIALS, w, [S])
        yield P
        yield dP
        self.multiply("dV", w, y, P, dO)
        dS = self.m.start(FMA, f"dS({y})", 2 * entries / ARITHMETIC, w, [P, dP])
        yield dS
        return dS

    def multiply(self, name: str, w: int, y: int, *needs: Event) -> Event:
        """A product of 64 keys, B_r queries and the head size."""
        return self.m.start(TENSOR, f"{name}({y})", product(ROWS, self.B_r, self.d), w, needs)

    def start_dq(self, w: int, y: int) -> Event:
        """A 64 x 64 piece of dQ = dS K, over the keys of both groups."""
        return self.m.start(TENSOR, f"dQ({y})", product(64, 64, ROWS * len(GROUPS)), w, [self.both("dS", y)])

    def hand_over(self, w: int, y: int) -> Role:
        """To the writer, once it has added the piece before."""
        if y > 0:
            yield self.task("add", y - 1, w)
        self.m.arrive(self.m.event(f"piece {y}", w))


def channel(uses: int, fill: float, read: float) -> list[Span]:
    """A producer that copies into STAGES stages, and two consumers that read by products."""
    pipeline = Pipeline()
    m = pipeline.m

    def producer() -> Role:
        for n in range(uses):
            empty = [pipeline.both("empty", n - STAGES)] if n >= STAGES else []
            yield from empty
            m.start(TMA, f"fill {n}", fill, needs=empty)

    def consumer(w: int) -> Role:
        for n in range(uses):
            full = m.event(f"fill {n}")
            yield full
            yield m.start(TENSOR, f"read {n}", read, w, [full])
            m.arrive(pipeline.both("empty", n))

    return m.run(producer(), *(consumer(w) for w in GROUPS))


def assign(t: int, tiles: int, heads: int, section: int) -> tuple[int, int]:
    """(head, tile) number t of all, as in tile/schedule.py: `section` heads side by side, the last tile first."""
    first = t // (section * tiles) * section
    r = t % (section * tiles)
    width = min(heads - first, section)
    return first + r % width, tiles - 1 - r // width


def order(tiles: int, heads: int, programs: int, section: int, counter: bool) -> list[Span]:
    """Square causal tiles by programs: a program's next one comes from a counter, or is `programs` further on."""
    m = Machine()
    drawn = programs - 1

    def next_of(t: int) -> int:
        nonlocal drawn
        drawn += 1
        return drawn if counter else t + programs

    def program(p: int) -> Role:
        t = p
        while t < tiles * heads:
            t_next = next_of(t)  # drawn early: as this tile's loads begin
            h, i = assign(t, tiles, heads, section)
            yield m.start(f"program {p}", f"{h}, {i}", i + 1)
            t = t_next

    return m.run(*(program(p) for p in range(programs)))
