"""The tensors of a call, of a forward's results, and of gradients."""

from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """The tensors of a call: q, k, v; then those of mask, score, sink and layout, in the order of Problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor, ...]


class Saved(NamedTuple):
    """The results of a forward: o (B, M, H, D_v) and lse (B, H, M), packed (T, H, D_v) and (H, T), and dropout's seed.

    `extra` holds tensors that the back end saved for its backward, which must also work without them.
    """

    o: Tensor
    lse: Tensor
    seed: Tensor | None = None
    extra: tuple[Tensor, ...] = ()


class Grads(NamedTuple):
    """The gradients dq, dk and dv, and one gradient or None per extra operand."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor | None, ...]

    def packed(self) -> Tensor:
        """Return the tensor (..., 3, H, D) of which dq, dk and dv are views, as `empty_parts` made them."""
        *rows, H, D = self.q.shape
        return self.q.as_strided((*rows, 3, H, D), (*self.q.stride()[:-2], H * D, D, 1))


class Codes(NamedTuple):
    """What an 8-bit forward multiplies. A head has `blocks_of` blocks; packed sequences share them (`first_block`)."""

    q: Tensor
    """int8 (blocks, 64, size); e4m3 where q, k and v are Quantized."""
    k: Tensor
    """int8 (blocks, 128, size), or e4m3 so too."""
    q_descale: Tensor
    """fp32 (blocks, 64): q times this, and k times k_descale, multiply to Q K^T; without the factor on the logits."""
    k_descale: Tensor
    """fp32 (blocks,)."""
    q_shift: Tensor
    """fp32 (blocks, 64): scale * q . mean, which lse misses."""
    mean: Tensor
    """fp32 (B, H_k, size)."""
    balance: Tensor
    """fp32 (B, H_k, size), powers of two: Q's channels are multiplied, K's divided."""
    v: Tensor | None = None
    """e4m3 (blocks, size, 128), the columns in the order of `key_order`; None with "int8"."""
    v_descale: Tensor | None = None
    """fp32 (blocks,), powers of two, or what the caller gave."""

    def present(self) -> tuple[Tensor, ...]:
        """Return the tensors that there are, which a forward saves for `Codes(*saved)`."""
        return tuple([t for t in self if t is not None])
