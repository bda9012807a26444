"""Schemes of low precision: functions of q, k and v (rows, head size) in fp32 that return o."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import tilewise as tw
from tilewise.attention import reference
from tilewise.quantize.codes import rotated, signs_of

BLOCK = 128
E4M3 = 448.0


def draw(name: str, rows: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v: "paper" is FlashAttention-3's N(0, 1) + N(0, 100) Bernoulli(0.001). "outliers" has four channels
    of K, and the same of Q, that are 10 and 4 times as large as the others. "sink" has a first key that takes about
    half of each row, and whose value is small. "channels" has channels of unequal size, means in some channels of K,
    and such a key."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    q, k, v = (normal(rows, size) for _ in range(3))
    if name == "paper":
        q, k, v = (
            t + 10 * normal(rows, size) * (torch.rand(rows, size, generator=g) < 0.001) for t in (q, k, v)
        )  # fmt: skip
    elif name == "channels":
        spread, some = torch.exp(0.8 * normal(size)), torch.rand(size, generator=g) < 0.06
        k = k * spread + torch.where(some, 12 * normal(size), 0.3 * normal(size))
        q, v = q / spread.clamp(0.5, 4), v + 0.5 * normal(size)
        k[0], v[0] = 3 * k[0], 0.02 * v[0]
    elif name == "outliers":
        some = torch.randperm(size, generator=g)[:4]
        q[:, some], k[:, some] = 4 * q[:, some], 10 * k[:, some]
    elif name == "sink":
        q[:, 0], k[0], v[0] = q[:, 0].abs() + 1, 0.0, 0.02 * v[0]
        k[0, 0] = torch.tensor(rows).log() * size**0.5 / q[:, 0].mean()
    elif name != "normal":
        raise ValueError(f"draw must be normal, paper, outliers, sink or channels, got {name!r}")
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in fp64."""
    return torch.softmax(q.double() @ k.double().mT * q.shape[1] ** -0.5, -1) @ v.double()


def e4m3(x: Tensor, rows: int | None) -> Tensor:
    """Round to e4m3 with a scale for each block of rows, or with None for the whole tensor."""
    whole = x.unflatten(0, (-1, rows or x.shape[0]))
    top = whole.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30)
    return ((whole / top * E4M3).to(torch.float8_e4m3fn).float() * top / E4M3).flatten(0, 1)


def in_e4m3(rotate: bool, rows: int | None) -> Callable[..., Tensor]:
    """Return a scheme of two e4m3 products, as FlashAttention-3's: `rotate` q and k, and scales for blocks of rows."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotate:
            signs = signs_of(q.shape[1], q.device) * q.shape[1] ** -0.5
            q, k = rotated(q * signs), rotated(k * signs)
        q, k, v = e4m3(q, rows), e4m3(k, rows), e4m3(v, None)
        S = q @ k.mT * q.shape[1] ** -0.5
        P = torch.exp(S - S.amax(-1, keepdim=True))
        return (P.mul(256).to(torch.float8_e4m3fn).float() / 256) @ v / P.sum(-1, keepdim=True)

    return attend


def of_tilewise(dtype: torch.dtype, precision: str | None) -> Callable[..., Tensor]:
    """Return tilewise's attention of inputs in a type."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(*(t.to(dtype)[None, :, None] for t in (q, k, v)), precision=precision)[0, :, 0].float()

    return attend


SCHEMES: dict[str, Callable[..., Tensor]] = {
    "e4m3, one scale a tensor": in_e4m3(False, None),
    "e4m3, a scale for each block": in_e4m3(False, BLOCK),
    "e4m3, rotated, one scale": in_e4m3(True, None),
    "e4m3, rotated, blocks: FlashAttention-3": in_e4m3(True, BLOCK),
    'tilewise "fp8"': of_tilewise(torch.float16, "fp8"),
    'tilewise "int8"': of_tilewise(torch.float16, "int8"),
    "tilewise, bf16": of_tilewise(torch.bfloat16, None),
    "tilewise, fp16": of_tilewise(torch.float16, None),
}


def errors(name: str, rows: int, size: int, seeds: int = 3) -> Iterator[tuple[str, float, float]]:
    """Yield each scheme with its root mean square error, and that over the root mean square of o."""
    for scheme, attend in SCHEMES.items():
        wrong = total = 0.0
        for seed in range(seeds):
            q, k, v = draw(name, rows, size, seed)
            q, k, v = (t.half().float() for t in (q, k, v))
            true = exact(q, k, v)
            wrong += float((attend(q, k, v) - true).square().mean())
            total += float(true.square().mean())
        yield scheme, (wrong / seeds) ** 0.5, (wrong / total) ** 0.5


def in_one_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return o of e4m3 P and V, summed as in a tensor core of Hopper that is not emptied: after every 32 keys the sum
    keeps 13 bits behind its first, and loses the rest."""
    S = q @ k.mT * q.shape[1] ** -0.5
    P = torch.exp(S - S.amax(-1, keepdim=True)).mul_(256).to(torch.float8_e4m3fn).float()
    v, o = e4m3(v, BLOCK), torch.zeros(len(q), v.shape[1])
    for j in range(0, len(k), 32):
        o = ((o + P[:, j : j + 32] @ v[j : j + 32]).view(torch.int32) & -(1 << 10)).view(torch.float32)
    return o / P.sum(-1, keepdim=True)


def by_length(lengths: list[int], size: int = 128) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield how long o is, over its true length, for keys of these numbers and a mean in V: in tilewise, and where sums
    stay in the tensor core."""
    for length in lengths:
        g = torch.Generator().manual_seed(length)
        q, k, v = (torch.randn(n, size, generator=g) for n in (BLOCK, length, length))
        q, k, v = (t.bfloat16().float() for t in (q, k, v + torch.randn(size, generator=g)))
        true = exact(q, k, v)
        found = {name: of_tilewise(torch.bfloat16, name)(q, k, v) for name in ("fp8", "int8")}
        found["in one sum"] = in_one_sum(q, k, v)
        yield length, {name: float((o.double() * true).sum() / true.square().sum()) for name, o in found.items()}


def gradient_errors(name: str, rows: int = 1024, size: int = 128) -> Iterator[tuple[str, list[float]]]:
    """Yield relative errors of dq, dk and dv: in bf16, in 8 bits, and of a backward that gets the original tensors
    and the lse of 8 bits."""
    q, k, v = (t.bfloat16()[None, :, None] for t in draw(name, rows, size, 0))
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    true = reference.gradients(*(t.double() for t in (q, k, v, do)))[:3]

    def errors_of(found: tuple[Tensor, ...]) -> list[float]:
        return [float((a.double() - t).norm() / t.norm()) for a, t in zip(found, true, strict=True)]

    for precision in (None, "int8", "fp8"):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        o, lse = tw.attention(*leaves, precision=precision, return_lse=True)
        yield precision or "bf16", errors_of(torch.autograd.grad(o, leaves, do))
        if precision:
            careless = tw.attention_backward(do, q, k, v, o.detach(), lse.detach())
            yield f"{precision}, then bf16 of the original tensors", errors_of(careless[:3])
