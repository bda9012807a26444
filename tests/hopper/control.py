"""Control for racecheck: two hand-overs between warps as a textbook has them, and the same without waiting.

    lead      one warp      draws numbers from a counter, and hands them on to `pass_on`, as a queue does with tickets
    pass_on   a warpgroup   adds them to a row of numbers, which it hands on to `collect`
    collect   a warpgroup   sums the rows up

Only Triton's own barrier functions stand here, none of tilewise's. What racecheck says of the kernel that waits,
"control" in its reports, it says of right ones; if it says nothing of the one that does not, "broken", it sees nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROUNDS = gl.constexpr(8)
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
NUMBER = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def barrier():
    """One arrival completes it."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, 1)
    return bar


@gluon.jit
def wait(bar, phase, WAITS: gl.constexpr):
    """Until a phase is complete; not at all in the kernel that is meant to race."""
    if WAITS:
        mbarrier.wait(bar, phase)


@gluon.jit
def fetch_next_tile(Counter):
    """The next number; Triton tells it to the whole warp through shared memory."""
    return gl.atomic_add(Counter, 1)


@gluon.jit
def lead(Counter, number, filled, emptied, WAITS: gl.constexpr):
    """The number of every round."""
    for n in range(ROUNDS):
        drawn = fetch_next_tile(Counter)
        wait(emptied, (n & 1) ^ 1, WAITS)
        number.store(gl.full([1], drawn, gl.int32, NUMBER))
        mbarrier.arrive(filled)


@gluon.jit
def pass_on(number, filled, emptied, row, row_filled, row_emptied, WAITS: gl.constexpr):
    """Every round's number, plus 0 to 127."""
    for n in range(ROUNDS):
        wait(filled, n & 1, WAITS)
        x = gl.max(number.load(ROW), 0)
        mbarrier.arrive(emptied)
        wait(row_emptied, (n & 1) ^ 1, WAITS)
        row.store((x + gl.arange(0, 128, ROW)).to(gl.int64))  # in 32 bits it would be stmatrix, not a plain store
        mbarrier.arrive(row_filled)


@gluon.jit
def collect(Out, row, row_filled, row_emptied, WAITS: gl.constexpr):
    """The sum of all rows, to memory."""
    total = gl.zeros([128], gl.int64, ROW)
    for n in range(ROUNDS):
        wait(row_filled, n & 1, WAITS)
        total += row.load(ROW)
        mbarrier.arrive(row_emptied)
    gl.store(Out + gl.arange(0, 128, ROW), total)


def named(specialization):
    """What the kernel is called in a report."""
    return "control" if specialization.constants["WAITS"] else "broken"


@gluon.jit(repr=named)
def send_dq(Out, Counter, WAITS: gl.constexpr):
    """All three roles."""
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled, emptied, row_filled, row_emptied = barrier(), barrier(), barrier(), barrier()
    gl.warp_specialize(
        [
            (pass_on, (number, filled, emptied, row, row_filled, row_emptied, WAITS)),
            (collect, (Out, row, row_filled, row_emptied, WAITS)),
            (lead, (Counter, number, filled, emptied, WAITS)),
        ],
        [4, 1], [120, 24],
    )  # fmt: skip
