"""Hand buffers from warp to warp: barriers in shared memory count how often each was filled or emptied.

Use n of a channel takes stage n % stages. The barrier's phase is the parity of how often that stage was used.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Channel(NamedTuple):
    """Hold stages of shared memory, with one barrier each for "full" and for "empty"."""

    memory: object
    full: object
    empty: object


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Allocate one barrier per stage, complete after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), COUNT)
    return bars


@gluon.jit
def wait(bars, n):
    """Wait until use n is complete."""
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(n % STAGES), n // STAGES & 1)


@gluon.jit
def wait_before(bars, n):
    """Wait until the previous use of n's stage is complete; return at once if there was none."""
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(n % STAGES), (n // STAGES & 1) ^ 1)


@gluon.jit
def arrive(bars, n):
    """Arrive at use n with this warpgroup."""
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.arrive(bars.index(n % STAGES))


@gluon.jit
def expect(bars, n, BYTES: gl.constexpr):
    """Complete use n once BYTES bytes have come, and return the stage's barrier for them."""
    STAGES: gl.constexpr = bars.shape[0]
    bar = bars.index(n % STAGES)
    mbarrier.expect(bar, BYTES)
    return bar


@gluon.jit
def stage(memory, n):
    """Return the stage of use n."""
    STAGES: gl.constexpr = memory.shape[0]
    return memory.index(n % STAGES)


@gluon.jit
def stage_in_loop(memory, n, y):
    """Return the stage of use n, which lasts for a whole loop over other uses y. y >> 31 is 0, but ptxas cannot know
    that. Otherwise it would keep every address that a product takes from the stage in registers, which are short."""
    STAGES: gl.constexpr = memory.shape[0]
    return memory.index(n % STAGES + (y >> 31))


@gluon.jit
def instruct(PTX: gl.constexpr):
    """Run one instruction that has no result; Triton wants a result of every one."""
    gl.inline_asm_elementwise(PTX + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_equal(at, value):
    """Wait until a number in memory is `value`: then what its writer wrote before can be read."""
    while gl.atomic_add(at, 0, sem="acquire") != value:
        pass


@gluon.jit
def wait_reductions():
    """Wait until what TMA added for this warp is visible to others; `tma.store_wait` waits only until it is read."""
    instruct("cp.async.bulk.wait_group 0")


@gluon.jit
def fence_async_global():
    """Order plain accesses of global memory and those of TMA."""
    instruct("fence.proxy.async.global")


@gluon.jit
def end_block(y):
    """End a basic block: ptxas moves no wait over its end. No use y is negative, but ptxas cannot know that."""
    PTX: gl.constexpr = (
        "{.reg .pred used; setp.ge.s32 used, $1, 0; @used bra L${:uid}; nanosleep.u32 1; bar.warp.sync 0xffffffff;"
        "L${:uid}: mov.u32 $0, 0;}"
    )
    gl.inline_asm_elementwise(PTX, "=r,r", [y], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_order(x):
    """Return fp32 numbers as they are, but not before what stands above has been issued."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def wait_dependencies():
    """Wait until the kernels launched before this one are complete, so that the threads that wait can read what those
    wrote. Only a launch with `launch_pdl` begins earlier."""
    instruct("griddepcontrol.wait")


@gluon.jit
def launch_dependents():
    """Let a kernel launched after this one with `launch_pdl` begin, once every program has called this."""
    instruct("griddepcontrol.launch_dependents")


@gluon.jit
def named_barrier(OP: gl.constexpr, WHO: gl.constexpr):
    """Use the named barrier of warpgroup WHO and one other (ping-pong): "sync" waits until WHO may run, "arrive" lets
    it."""
    # ids 9 to 11: Triton itself uses those from 0 on
    if WHO == 0:
        instruct("bar." + OP + " 9, 256")
    elif WHO == 1:
        instruct("bar." + OP + " 10, 256")
    else:
        instruct("bar." + OP + " 11, 256")
