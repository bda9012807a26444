"""diffusers' dispatch_attention_fn with the back ends flash, flash_varlen, _flash_3 and _flash_varlen_3: as native.

So are the two functions of its context parallelism. _flash_3 is an operator declared for CUDA alone; on a CPU its own
function is registered for CPU tensors, too.
"""

import torch

from tilewise.compat import install

install("flash_attn", "flash_attn_interface")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402

assert dispatch._CAN_USE_FLASH_ATTN
assert dispatch._CAN_USE_FLASH_ATTN_3
if not torch.cuda.is_available():
    dispatch._wrapped_flash_attn_3.register_kernel("cpu")(dispatch._wrapped_flash_attn_3._init_fn)

torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v, do = (torch.randn(2, 48, 4, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))


class Parallel(torch.autograd.Function):
    """What diffusers' context parallelism does on each device."""

    @staticmethod
    def forward(ctx, *operands):
        return dispatch._flash_attention_forward_op(ctx, *operands)

    @staticmethod
    def backward(ctx, grad):
        return dispatch._flash_attention_backward_op(ctx, grad)


def run(backend, kind=torch.bfloat16):
    x = [t.to(kind).requires_grad_() for t in (q, k, v)]
    if backend == "parallel":
        out = Parallel.apply(*x)
    else:
        with dispatch.attention_backend(backend):
            out = dispatch.dispatch_attention_fn(*x)
    if backend == "_flash_3":  # which has no gradient
        return [out]
    return [out, *torch.autograd.grad(out, x, do.to(kind))]


exact, native = run("native", torch.float64), run("native")
for backend in ("flash", "flash_varlen", "_flash_3", "_flash_varlen_3", "parallel"):
    for mine, theirs, true in zip(run(backend), native, exact, strict=False):
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max(), backend
assert dispatch._wrapped_flash_attn_forward.__module__ == "tilewise.compat.flash_attn.flash_attn_interface"
print(dispatch.flash_attn_func)
