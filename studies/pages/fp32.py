"""docs/results/fp32.md: how fp32 attention is computed, llm.c's story, and what of both was measured."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from tilewise.bench.tables import markdown

from ..training.contests import PART

SUITE = "llmc"
"""Its tables are on this page."""
RATES = {"FMA": 67.0, "TF32": 494.7, "fp16, bf16": 989.4}
"""TFLOP/s of an H200's units without sparsity, from NVIDIA's data sheet."""


class Way(NamedTuple):
    """How a precision multiplies two fp32 numbers."""

    name: str
    unit: str
    type: str
    bits: int
    """Significant ones of a piece."""
    pieces: int

    @property
    def products(self) -> int:
        """Those of pieces i and j, counted from 1, with i + j <= pieces + 1."""
        return self.pieces * (self.pieces + 1) // 2

    @property
    def cells(self) -> list[str]:
        """A line of the page's table."""
        n, bits = self.pieces, self.bits * self.pieces
        left_out = f"2^-{bits}" if n > 1 else "nothing"
        kept = f"{n} {self.type}" if n > 1 else self.type
        return [
            f"`{self.name}`", self.unit, kept, str(min(bits, 24)), str(self.products), left_out,
            f"{RATES[self.unit] / self.products:.0f}",
        ]  # fmt: skip


WAYS = (
    Way("ieee", "FMA", "fp32", 24, 1),
    Way("bf16x6", "fp16, bf16", "bf16", 8, 3),
    Way("tf32x3", "TF32", "tf32", 11, 2),
    Way("fp16x3", "fp16, bf16", "fp16", 11, 2),
    Way("bf16x3", "fp16, bf16", "bf16", 8, 2),
    Way("tf32", "TF32", "tf32", 11, 1),
)
COLUMNS = ["name", "unit", "a number is", "its bits", "products", "left out", "at most, TFLOP/s"]

INTRODUCTION = """# fp32 attention

Written by `python benchmarks/report.py`: its text from `studies/pages/fp32.py`, its numbers from the
files in `benchmarks/results`; edit nothing here by hand.

fp32 is what one trains in to be sure, and what matrix units are not made for. This page says how attention in fp32 is
computed here, on which unit and how exactly; why an earlier FP32 FlashAttention trained to a higher loss, and which
test would have shown it; and what was measured. What is promised stands in
[Numerics](../use/numerics.md#how-wrong-a-result-may-be), and how wrong every precision is, against fp64, in
[Accuracy of
fp32](accuracy.md).

## What a product is worth

A chip has products of whole fp32 numbers in its ordinary units only, as fused multiply-adds (FMA). Its matrix units
take shorter numbers, and are many times as fast. So a fast fp32 product takes its numbers to pieces, multiplies the
pieces in the matrix unit, where a product of two pieces is exact, and adds up those products that matter:

    a   = a_1 + a_2 + ...    each the rest, rounded to the short type
    a b = sum of a_i b_j     over i + j <= pieces + 1
"""

AFTER_WAYS = """
*Its bits* are those of a number that the pieces hold, of fp32's 24; *left out* is the largest product that is not
computed, over a b; *at most* is the rate of an H200's unit, from NVIDIA's data sheet, over the number of products: no
kernel can multiply faster. So three products of fp16 have five times the ceiling of plain fp32, and six of bf16, which
hold every bit, still two and a half times. fp16's pieces are longer than bf16's for the same price; what they pay is
range, and that is what [powers of two](#powers-of-two) are for.

`precision=` names one. Without it, torch's setting asks for a class: on Hopper, where its kernels take the call,
"highest", which is the default, means `bf16x6`, and "high" and "medium" mean `fp16x3`. The
[table](../use/numerics.md#fp32-on-a-gpu-the-precision-of-products) says what each chip has. Hopper's fp32 kernels leave
scores, dropout and head sizes over 128 [to the portable
ones](../internals/hopper-forward.md#what-is-refused), and a CPU computes in plain
fp32.

## The formulas, and the lines that compute them

The portable kernels pass the precision to `tl.dot`. Hopper's have these lines of their own; `tests/test_docs.py` looks
every one of them up.

### Pieces

Each piece is the rounded rest of those before ([`split.py`](../../src/tilewise/hopper/fp32/split.py)):

    a_n = round(a - a_1 - ... - a_(n-1))

```python
piece = whole.to(TYPE)
return piece, rest - piece.to(tl.float32)
```

The rest is exact: two numbers this close to each other have a difference in fp32. TF32 alone is rounded, too, because
the matrix unit would cut the bits off ([`blocks.py`](../../src/tilewise/tile/blocks.py)):

```python
return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)
```

### Smallest products first

In the forward ([`forward_products.py`](../../src/tilewise/hopper/fp32/forward_products.py)), with pieces
counted from 0:

    S = sum over n = 0, 1, ... of the sum over i of a_(pieces - 1 - n - i) b_i

```python
for n in gl.static_range(PIECES):
    for i in gl.static_range(PIECES - n):
        acc = warpgroup_mma(a[PIECES - 1 - n - i], b[i], acc, use_acc=n + i > 0, is_async=True)
```

Matrix units align the terms of a sum with the largest of them and cut off what sticks out below. What is added while
the sum is small loses least, so the smallest products come first and a_1 b_1 last.

### A fresh accumulator for every tile

They also cut, where an FMA rounds. Rounding errs to either side, and many errors partly cancel; cutting errs to one
side, and its errors add up: a sum kept in the matrix unit over a whole row is off in proportion to the row's length.
So the product of each tile begins at zero, and joins the sum so far by an FMA, which is needed anyway to rescale it.
On Hopper, with what undoes V's scale in the same line, and P's (`joined`, in the same file):

    O = alpha O + 2^-e P V_j

```python
return o * alpha + fresh
```

In the portable forward ([`forward.py`](../../src/tilewise/triton/forward.py)):

```python
acc = tl.fma(acc, alpha[:, None], product(P, v, PRECISION))
```

And in its backward ([`backward.py`](../../src/tilewise/triton/backward.py)), where a factor of 1 that the compiler does
not know keeps the two apart:

```python
return tl.fma(product(a, b, PRECISION), one, acc)
```

### Powers of two

Two fp16 pieces hold 22 bits, but only of numbers between 2^-14 and 2^16, and their rests must be in range, too. So
each row of Q, and each tile of keys or values, is multiplied by the power of two that takes its largest entry close to
the top ([`split.py`](../../src/tilewise/hopper/fp32/split.py)):

    2^n largest in [2^14, 2^15)

```python
n = tl.minimum(141 - (top.to(tl.int32, bitcast=True) >> 23), 126)
```

A multiplication by a power of two rounds nothing, and undoing it costs nothing: Q's and K's go into the factor that
turns logits into base 2, V's into the FMA above. P is at most 1, so its scale is known before: 2^15, taken from the
row maximum, at no cost either ([`softmax.py`](../../src/tilewise/tile/softmax.py)):

    2^15 P = exp2(c S - (m - 15))

```python
if RAISE:
    top -= RAISE
```

dS has no bound that is known before, but one that follows from its factors. It is computed for each pair of tiles
([`fp32/backward.py`](../../src/tilewise/hopper/fp32/backward.py)):

    dS      = P (dO V^T - delta)
    abs(dS) <= max norm(V_j) max norm(dO_i) + max abs(delta_i)

```python
down, up = power_above(v_norm * gl.load(scales.do_norm + block) + gl.load(scales.D + block))
```

The price: in a tile whose entries differ by more than 2^15, small ones keep fewer bits ([how
many](../use/numerics.md#fp32-on-a-gpu-the-precision-of-products)). `bf16x6` has fp32's range and no scales.

### Keys and values far from zero

dQ = sum_j dS_ij K_j, and the dS of a row sum to zero. If all keys lie around a point c far from zero, dQ is a small
difference of large numbers. Nothing changes if c is taken from all keys, nor if a point is taken from all values:

    sum_j dS_ij K_j = sum_j dS_ij (K_j - c)
    Q K^T - L       = Q (K - c)^T - (L - Q c)

So the kernel that takes keys and values to pieces also looks for such a point: the mean of a sample of 16 rows, if all
of them are nearer to it than it is to zero ([`split.py`](../../src/tilewise/hopper/fp32/split.py)):

```python
near = away < 0.75 * tl.sqrt(tl.sum(mean * mean, 0))  # false where anything is not finite
```

The backward's preparation takes it from them, and what follows from that from lse, so that P stays what it is
([`fp32/preprocess.py`](../../src/tilewise/hopper/fp32/preprocess.py)):

```python
logs -= unit * tl.sum(q * centre_of(K, b, h // group, H // group, SIZE)[None, :], 1)
```

and from O, so that delta does:

```python
o -= centre_of(V, b, h // group, H // group, SIZE)[None, :]  # past the end dO is 0
```

With a sink or a gradient of lse the sum over a row is not zero, and nothing is centred.

### Infinities and NaN, row by row

Taken apart, inf would become inf - inf = NaN. So an entry that is not finite is 0 in every piece but its last, and
only there itself ([`split.py`](../../src/tilewise/hopper/fp32/split.py)):

```python
whole = tl.where(tl.abs(rest) < INF, rest, 0.0)
```

The last piece only ever meets the first of the other operand, which has its sign: inf times a number is the inf that
fp32 has. And no scale is made from it, so its neighbours are as exact as ever:

```python
return tl.max(tl.where(tl.abs(x) < INF, tl.abs(x), 0.0), AXIS)
```

It reaches the rows that it reaches in fp32: [which](../use/numerics.md#inf-and-nan).
`tests/hopper/test_pieces.py` and the
conformance cases with inf and NaN hold the kernels to it.

## llm.c, and a loss that was too high

[llm.c](https://github.com/karpathy/llm.c) trains GPT-2 in C and CUDA. [Pull request
781](https://github.com/karpathy/llm.c/pull/781) gave its fp32 version FlashAttention kernels, forward and backward:
causal, 12 heads of 64, on the projection's output (B, T, 3, H, D) as it is. The forward keeps L = m + log l of every
row and no matrix of scores; the backward computes D = rowsum(dO O) first, and S and P again. It was faster than the
attention it was to replace, and its author reported what nobody could explain: a training ended at a loss of 3.51 in
place of 3.49.

Its precision is not to blame. llm.c hands `attention_backward` a buffer for the gradient of qkv, `dl_bt4c`, that all
blocks share, and in which the MLP of the same block has just left the gradient of its own. llm.c's kernels overwrite
it. The pull request's backward sums dQ up there, tile by tile, so it *adds* dQ to what it finds: dQ comes out as dQ
plus another layer's numbers. Those weights that make the queries then learn partly from noise; the loss still falls,
only not as far.

Before tilewise had kernels, the three were run beside each other on an H200; no results file holds that run. It took 74
steps of GPT-2 124M from one random initialisation. The validation loss was 6.356 with llm.c, 6.465 with the pull
request, and 6.356 with the pull request and that buffer set to zero.

### The test that would have caught it

A single call on fresh memory does not show the fault: memory from the driver is often zero. So the tests never leave
that to chance:

- `tests/conftest.py` makes torch fill all memory that it hands out with NaN. What is added to it is NaN.
- [Every conformance case](../../tests/conformance/test_conformance.py) runs twice, and the results must be
  the same bits
  (dq on Hopper where `deterministic=True` asks for it). What is added to memory that an implementation keeps differs
  the second time.
- And [one rule](../../tests/conformance/rule.py) compares dq, dk and dv with fp64, not only the output, and
  not only the
  loss.

[`tests/studies/test_llmc.py`](../../tests/studies/test_llmc.py) plants exactly this fault, in a small
FlashAttention that
is right otherwise: its backward adds dQ to memory that is fresh, or another layer's, or its own from the call before.
The very test that every back end passes rejects each of them, and accepts the same code on zeroed memory. The last
test trains a small GPT whose MLPs leave their gradients in the buffer, as llm.c's do: the comparison that
`studies train` makes says that its losses differ, and that tilewise's are equal to standard attention's but for
rounding.

### What is done here

The call is the same: [`attention_qkvpacked`](../api/tilewise.md#tilewise.attention_qkvpacked) reads q, k and
v where they
lie in one tensor, and writes dq, dk and dv into one other. The forward keeps o and lse. The portable kernels write dq,
dk and dv once and add to no memory. On Hopper, key tiles do add to dQ, to sums that the backward allocates, and whose
zeros its own preparation writes before ([`fp32/preprocess.py`](../../src/tilewise/hopper/fp32/preprocess.py)):

```python
tl.store(dQ + row[:, None] * SIZE + entries[None, :], tl.zeros([BLOCK, SIZE], tl.float32))
```

## What was measured

- `python benchmarks/run.py --suite llmc`: attention alone, in llm.c's shape, each precision beside PyTorch's
  memory-efficient kernel, and beside attention written out in torch (*standard*), in fp32 and in TF32. How times are
  taken stands in [Performance](performance.md).
- `python -m studies train --model gpt2-124m --precision fp32`: the whole of GPT-2 124M as llm.c trains it, once with
  each attention, from the same beginning. It keeps every step's loss and time, attention's share of a step, the
  validation loss, and peak memory; `--context`, `--seeds` and `--deterministic` do what they say, and contexts that
  were trained stand side by side.
  On the H200 seeds from 4 on were tried with standard attention alone, moved and not (below), up to the first that
  stands still; the others say nothing of a precision. `benchmarks/results/repeats/nvidia-h200-standard-seeds.json`
  holds that run.
"""


HEADER = "\n".join([INTRODUCTION, markdown(COLUMNS, [way.cells for way in WAYS]), AFTER_WAYS])


def absent(contents: Iterable[dict[str, Any]]) -> list[str]:
    """What no results file holds, in a sentence each."""
    contents, lines = list(contents), []
    if not any(SUITE in content["suites"] for content in contents):
        lines.append("No results file holds times of attention alone yet.\n")
    if not any(PART in content for content in contents):
        lines.append("No results file holds a training yet.\n")
    return lines
