"""xformers: its import looks for flash_attn, and its flash operator then calls flash_attn_gpu, forward and backward.

The operator is declared for CUDA alone; on a CPU its own function is registered for CPU tensors, too.
"""

import torch

from tilewise.compat import install

install("flash_attn")

from xformers.ops import fmha  # noqa: E402
from xformers.ops.fmha import attn_bias, flash  # noqa: E402

assert flash.FLASH_VERSION == "2.8.3"
assert flash._flash_attn_cuda.__name__ == "tilewise.compat.flash_attn.flash_attn_gpu"
if not torch.cuda.is_available():
    for operator in (flash._flash_fwd, flash._flash_bwd):
        operator.register_kernel("cpu")(operator._init_fn)

torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v, do = (torch.randn(1, 96, 4, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
BIASES = (
    None,
    attn_bias.LowerTriangularMask(),
    attn_bias.LocalAttentionFromBottomRightMask(window_left=5, window_right=3),
    attn_bias.BlockDiagonalMask.from_seqlens([20, 28, 30, 18]),
    attn_bias.BlockDiagonalCausalMask.from_seqlens([20, 28, 30, 18]),
)


def plain(bias, kind):
    x = [t.to(kind).transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    shown = None if bias is None else bias.materialize((96, 96), dtype=kind, device=DEVICE)
    out = torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=shown)
    return [t.transpose(1, 2) for t in (out, *torch.autograd.grad(out, x, do.to(kind).transpose(1, 2)))]


for bias in BIASES:
    given = fmha.Inputs(q, k, v, attn_bias=bias)
    out, context = flash.FwOp.apply(given, needs_gradient=True)
    grads = flash.BwOp.apply(context, given, do)
    exact, torchs = plain(bias, torch.float64), plain(bias, torch.bfloat16)
    for mine, theirs, true in zip((out, grads.dq, grads.dk, grads.dv), torchs, exact, strict=True):
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max(), bias
print(flash._flash_attn_cuda)
