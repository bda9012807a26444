"""Give Gluon's functions the same names in Triton 3.6 and in newer releases."""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of one warpgroup


@builtin
def _reduce_add(desc, coord, src, _semantic=None):
    """Compute desc[coord] += src: Triton 3.6 can do it, but has no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_add


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """View the same shared memory under another type, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
