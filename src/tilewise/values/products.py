"""How products are computed: exactly (Exact), or of codes of 8 bits (EightBits, and Scaled for tensors in e4m3)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .cached import check_scale
from .layout import Layout
from .rotation import Angles
from .value import Option

PRECISIONS = ("ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3", "tf32")
EIGHT_BITS = ("int8", "fp8")
"""Names of products of fp16 and bf16: approximations, never chosen by None or by torch's settings."""
CODE_TYPES = {
    "int8": (torch.int8, torch.int8, None),
    "fp8": (torch.int8, torch.int8, torch.float8_e4m3fn),
}
FASTER = {("fp8", 128): 16384, ("fp8", 256): 16384, ("int8", 256): 16384}
"""Keys from which on 8 bits were faster than 16 in every measurement (docs/results/eight-bits.md), by head size."""
PREFERENCE = {
    "highest": ("bf16x6", "ieee"),
    "high": ("fp16x3", "tf32x3", "bf16x6", "ieee"),
    "medium": ("tf32", "fp16x3", "tf32x3", "bf16x6", "ieee"),
}
"""What `precision=None` selects for each torch.get_float32_matmul_precision(): the first that is available."""


class Products(Option):
    """Every kind of products derives from this class. Absent tensors are None."""

    name: str | None
    """What `precision=` calls it."""
    scales: tuple[Any, ...] = ()
    """Those of q, k and v, fp32 (B, H_k), where all three are in e4m3."""
    codes: ClassVar[bool] = False
    """Whether a pass in front writes codes of q and k, and perhaps v, which the forward multiplies."""
    code_types: tuple[torch.dtype | None, ...] = (None, None, None)
    """The types of the codes of q, k and v; None of what is multiplied as it is."""

    @property
    def codes_of_v(self) -> bool:
        """Tell whether P V is multiplied in 8 bits, too."""
        return self.code_types[2] is not None

    @property
    def needs(self) -> frozenset[Any]:
        """Return what a back end must be able to multiply: types of codes."""
        return frozenset(self.code_types) - {None}

    @property
    def angles(self) -> Angles | None:
        """Return the angles by which the pass in front rotates q and k, or None."""
        return None

    @property
    def scaled(self) -> tuple[str, ...]:
        """Return which of q, k and v are in 8 bits, with a scale."""
        return ()

    def columns(self, problem: Any) -> int:
        """Return the columns of what is multiplied for Q K^T: the head size, or those of codes."""
        return problem.D

    def statistics(self, size: int, smooth: bool) -> tuple[Tensor, Tensor] | None:
        """Return K's mean (0 unless `smooth`) and the balance for codes of `size` columns, (B, H_k, size); None if the
        call is to measure them."""
        return None

    def prepared(self, q: Tensor, layout: Layout) -> "Products":
        """Return the same products with tensors as kernels take them, once their shapes are checked."""
        return self

    def check_origin(self, origin: Any) -> None:
        """Raise ValueError if a call with these products cannot be the part of a whole that begins at an Origin."""

    def check_contents(self) -> None:
        """Raise ValueError if the tensors hold wrong numbers."""

    def dtype(self, of_q: torch.dtype) -> torch.dtype:
        """Return the type of results, for that of q."""
        return of_q

    def out_dtype(self, asked: torch.dtype | None, of_q: torch.dtype) -> str | None:
        """Return the recipe's word for a type of o that was asked for, None for q's own; or raise ValueError."""
        own = self.dtype(of_q)
        if asked is None or asked == own:
            return None
        if asked != torch.float32 or own not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"out_dtype must be None, q's type {own}, or torch.float32 for 16-bit inputs, got {asked!r}; "
                "leave it out, and convert o"
            )
        return "float32"

    def against(self, problem: Any) -> list[str]:
        """Return why no back end runs a problem with these products."""
        return []

    def describe(self, problem: Any) -> list[str]:
        """Say what the products mean for a problem's accuracy and speed; nothing where they are exact."""
        return []

    def for_backward(self, problem: Any) -> Any:
        """Return the problem whose backward gives the gradients: itself, unless a forward approximates."""
        return problem

    def coded(self, packed: bool) -> int:
        """Return of how many of q, k and v a backward reads the codes alone; `packed`, of the tensor that has all."""
        return 0


@dataclass(frozen=True, eq=False)
class Exact(Products):
    """Products of the inputs' type, with fp32 sums; of fp32, in the precision named, or by torch's setting."""

    name: str | None = None
    numbers = ("name",)

    def check(self, problem: Any) -> None:
        if self.name is not None and problem.dtype != torch.float32:
            cast = torch._C._is_any_autocast_enabled()  # type: ignore[attr-defined]
            raise ValueError(
                f"precision must be None, int8 or fp8 for any type but fp32, got {self.name!r} with {problem.dtype}"
                f"{', autocast is on' if cast else ''}; leave it out, or "
                f"{'turn autocast off for this call' if cast else 'convert q, k and v to fp32'}"
            )


class Codes(Products):
    """Products of codes, which a pass in front writes."""

    codes = True

    def check(self, problem: Any) -> None:
        if problem.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"precision must be None or one of {', '.join(PRECISIONS)} for {problem.dtype}, got {self.name!r}; "
                "convert q, k and v to fp16 or bf16 for 8-bit products"
            )
        problem.check_devices(self.named)

    def against(self, problem: Any) -> list[str]:
        name, found = f"precision {self.name!r}", []
        if max(problem.D, problem.D_v) > 256:
            found.append(f"{name} takes head sizes up to 256, got {problem.D} and {problem.D_v}")
        if problem.layout.page(problem) is not None:
            found.append(f"{name} reads no cache; leave precision out")
        if self.codes_of_v and problem.recipe.dropout:
            found.append(f"{name} has no dropout; use precision='int8'")
        return found

    def columns(self, problem: Any) -> int:
        return next(size for size in (64, 128, 256) if max(problem.D, problem.D_v) <= size)

    def describe(self, problem: Any) -> list[str]:
        of_qk, of_pv = "e4m3" if self.scales else "int8", "e4m3" if self.codes_of_v else "16-bit"
        said = [f"approximate: {of_qk} Q K^T, {of_pv} P V"]
        if problem.N < FASTER.get((str(self.name), self.columns(problem)), math.inf):
            said.append(f"with {problem.N} keys not faster than 16 bits in every measurement")
        return said

    def for_backward(self, problem: Any) -> Any:
        return problem._replace(recipe=problem.recipe.exact())

    def coded(self, packed: bool) -> int:
        count = 3 - self.code_types.count(None)
        return count // 3 if packed else count  # of int8 it also reads v


@dataclass(frozen=True, eq=False)
class EightBits(Codes):
    """8-bit products, for `precision=`, with constants of a layer, and the angles of rotary.

    name: "int8" or "fp8".
    mean: fp32 (H_k, D) or (B, H_k, D), what K's rows lose. Any numbers are right, as softmax does not see them; good
        ones make K small. With a score or a sink, nothing is subtracted.
    balance: of mean's shapes, powers of two: channels of Q are multiplied by it, and those of K divided. Without mean
        and balance, 256 rows of each call decide them.
    cos, sin: (positions, R / 2), as for `rotary`. The pass that writes codes then rotates q and k, from position 0 of
        each sequence on. Results and gradients are those of `rotary_qk` before the call. They cover M and N positions,
        with a Varlen max_q and max_k.
    interleaved: how pairs lie, as for `rotary`.

    They have no gradients. Raises TypeError or ValueError for anything else, for cos and sin in the call.
    """

    name: str
    mean: Tensor | None = None
    balance: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    captures = ("mean", "balance", "cos", "sin")
    numbers = ("name", "interleaved")
    ranks = {"mean": 3, "balance": 3}  # noqa: RUF012

    def __post_init__(self) -> None:
        object.__setattr__(self, "interleaved", bool(self.interleaved))
        if self.name not in EIGHT_BITS:
            raise ValueError(f"EightBits: name must be int8 or fp8, got {self.name!r}; write one of them")
        for one, other in (("mean", "balance"), ("cos", "sin")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"EightBits: {one} must be given with {other}, got one alone; pass both, or neither")
        if self.mean is None or self.balance is None:
            return
        for name, t in (("mean", self.mean), ("balance", self.balance)):
            if not isinstance(t, Tensor) or t.dtype != torch.float32:
                got = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"EightBits: {name} must be a tensor of fp32, got {got}; convert it with .float()")
            if t.ndim not in (2, 3) or t.shape != self.mean.shape:
                raise ValueError(
                    f"EightBits: {name} must have shape (H_k, D) or (B, H_k, D), as the other, got {tuple(t.shape)}; "
                    "reshape it"
                )
            if t.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"EightBits: {name} must have no gradient, got requires_grad=True; detach it")

    @staticmethod
    def of(name: str, q: Tensor, k: Tensor) -> "EightBits":
        """Measure mean and balance on all rows of q (B, M, H, D) and k (B, N, H_k, D), after rotary; (H_k, D)."""
        q, k = q.detach().float(), k.detach().float()
        mean = k.mean((0, 1))
        of_q = q.unflatten(2, (k.shape[2], -1)).square().mean((0, 1, 3))
        exponent = torch.log2((k - mean).square().mean((0, 1)) / of_q) / 4
        return EightBits(name, mean, torch.exp2(exponent.nan_to_num(0.0, 0.0, 0.0).round().clamp(-24, 24)))

    def to(self, device: torch.device | str | int) -> "EightBits":
        """Return the same value on a device."""
        return self.rebuild(self.plain, [t.to(device) for t in self.tensors])

    @property
    def code_types(self) -> tuple[torch.dtype | None, ...]:
        return CODE_TYPES[self.name]

    @property
    def angles(self) -> Angles | None:
        return None if self.cos is None or self.sin is None else Angles(self.cos, self.sin, self.interleaved)

    def describe(self, problem: Any) -> list[str]:
        rotated = ["the pass that writes codes applies rotary to q and k"] * (self.cos is not None)
        return super().describe(problem) + rotated

    def statistics(self, size: int, smooth: bool) -> tuple[Tensor, Tensor] | None:
        if self.mean is None or self.balance is None:
            return None
        wider, mean = (0, size - self.mean.shape[-1]), self.mean if smooth else torch.zeros_like(self.mean)
        return torch.nn.functional.pad(mean, wider), torch.nn.functional.pad(self.balance, wider, value=1.0)

    def prepared(self, q: Tensor, layout: Layout) -> "EightBits":
        if self.angles is not None:
            self.angles.check(q)
        if self.mean is None or self.balance is None:
            return self
        shape = layout.count(q.shape), *self.mean.shape[-2:]
        mean, balance = (t.expand(shape).contiguous() if t.ndim == 2 else t for t in (self.mean, self.balance))
        return EightBits(self.name, mean, balance, self.cos, self.sin, self.interleaved)

    def check_origin(self, origin: Any) -> None:
        if self.cos is not None and (origin.row or origin.column):
            raise ValueError(
                f"origin must have row=0 and column=0 where EightBits has cos and sin, got {origin.row} and "
                f"{origin.column}; rotate q and k by tilewise.rotary before, and leave cos and sin out"
            )

    def check(self, problem: Any) -> None:
        super().check(problem)
        whole = problem.B, problem.H_k, problem.D
        for name, t in (("mean", self.mean), ("balance", self.balance)):
            if t is not None and tuple(t.shape) != whole:
                raise ValueError(
                    f"EightBits: {name} must have shape {whole[1:]} or {whole}, got {tuple(t.shape)}; make it fit k"
                )
        if self.angles is not None:
            self.angles.check_columns(problem.D)

    def check_lengths(self, problem: Any) -> None:
        if self.angles is not None:
            self.angles.check_positions(max(problem.M, problem.N))

    def check_contents(self) -> None:
        balance = self.balance
        if balance is not None and not bool(((torch.frexp(balance).mantissa == 0.5) & balance.isfinite()).all()):
            raise ValueError("EightBits: balance must hold powers of two, got others; use torch.exp2 of integers")


@dataclass(frozen=True, eq=False)
class Scaled(Codes):
    """Products of q, k and v that are e4m3 already, with a scale for each batch entry and key head."""

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    name = "fp8"
    code_types = (torch.float8_e4m3fn,) * 3
    captures = ("q_scale", "k_scale", "v_scale")
    numbers = ("name",)
    ranks = {"q_scale": 2, "k_scale": 2, "v_scale": 2}  # noqa: RUF012
    no_gradients = (
        "Quantized q, k and v are for inference, and an operand has requires_grad=True; run it under "
        "torch.no_grad(), or pass 16-bit tensors with precision='fp8'"
    )

    @property
    def named(self) -> dict[str, Tensor]:
        return dict(zip(("q's scale", "k's scale", "v's scale"), self.tensors, strict=True))

    @property
    def scales(self) -> tuple[Tensor, ...]:
        return self.tensors

    @property
    def scaled(self) -> tuple[str, ...]:
        return "q", "k", "v"

    def statistics(self, size: int, smooth: bool) -> tuple[Tensor, Tensor] | None:
        ones = self.k_scale.new_ones(*self.k_scale.shape, size)
        return torch.zeros_like(ones), ones

    def dtype(self, of_q: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def check_contents(self) -> None:
        for name, scale in zip(self.scaled, self.tensors, strict=True):
            check_scale(name, scale)


def products_of(precision: str | EightBits | None) -> Products:
    """Return what `precision=` asks for, or raise ValueError."""
    if precision is None:
        return EXACT
    if isinstance(precision, Codes):
        return precision
    if precision not in (*PRECISIONS, *EIGHT_BITS):
        raise ValueError(
            f"precision must be None or one of {', '.join((*PRECISIONS, *EIGHT_BITS))}, got {precision!r}; "
            "leave it out to follow torch.get_float32_matmul_precision()"
        )
    return EightBits(precision) if precision in EIGHT_BITS else Exact(precision)


EXACT = Exact()
