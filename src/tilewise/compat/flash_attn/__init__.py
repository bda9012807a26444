"""The flat functions of the flash_attn package, version 2.8, over `tilewise.attention`.

Names, order and defaults of arguments are that package's; what the arguments mean, once for all functions:

    q                   (B, M, H, D); varlen (T, H, D)
    k, v                (B, N, H_k, D); varlen (T', H_k, D); H a multiple of H_k
    kv, qkv             k and v, or all three, stacked in front of the heads: (B, N, 2, H_k, D), (T, 3, H, D), …
    cu_seqlens          int32 (batch + 1,): where each packed sequence starts; max_seqlen: the longest one's length
    dropout_p           probability on the softmax's entries; drawn from torch's generator
    softmax_scale       default D ** -0.5
    causal              query i sees keys j <= i + N - M: aligned to the last key
    window_size         (left, right), i + N - M - left <= j <= i + N - M + right; -1 is open; causal closes the right
    softcap             softcap * tanh(logits / softcap); 0.0 is off
    alibi_slopes        (H,) or (B, H): logits - slope * abs(i + N - M - j); no gradient
    deterministic       bitwise repeatable gradients
    return_attn_probs   return (out, softmax_lse, S_dmask) instead of out

softmax_lse is (B, H, M), varlen (H, T), fp32, the natural log of the softmax's denominator. S_dmask is empty, of shape
(0,), without dropout. With dropout it is (B, H, M, N) in q's type, with the longest lengths for M and N, zero outside a
sequence: the probabilities before dropout and before rescaling, negated where dropout removed them. It costs memory
and time quadratic in the length, synchronises, and is for tests.

Different from that package: the CPU, fp32, fp64 and any head size up to 256 run too; softmax_lse is differentiable, is
-inf (not inf) for a row that sees no key, and with causal ALiBi it is that of the logits written above (there, a
constant per row is left out); S_dmask is exact, and not padded to multiples of 128; the dropout pattern is tilewise's.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import tilewise as tw

from . import probabilities

Window = Sequence[int | Tensor]
Result = Any
"""out, or with return_attn_probs (out, softmax_lse, S_dmask)."""
