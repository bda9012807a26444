"""Programs in PyTorch: on index tensors of any shape, for the CPU, the reference, and dense masks.

Whole numbers are int64, floating ones have the logits' type. Negative indices into captured tensors count from the end;
others outside of them raise torch's IndexError.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derive import derivative, gathers
from .ops import OPS
from .program import Program, literal, operands


class Entries(NamedTuple):
    """The entries of the logits that a program is computed for: index tensors that broadcast to S (B, H, M, N)."""

    b: Tensor  # (B, 1, 1, 1)
    h: Tensor  # (1, H, 1, 1)
    i: Tensor  # (M, 1), from 0
    j: Tensor  # (1, N)
    shift: int = 0
    """N - M: what row indices are shifted by, so that the last row's is the last key's."""

    @property
    def aligned(self) -> Tensor:
        """Return the row indices, shifted."""
        return self.i + self.shift

    @staticmethod
    def of(B: int, H: int, M: int, N: int, device: torch.device | str = "cpu") -> "Entries":
        """Return all entries of logits (B, H, M, N)."""
        b, h, i, j = [torch.arange(size, device=device) for size in (B, H, M, N)]
        return Entries(b[:, None, None, None], h[None, :, None, None], i[:, None], j[None, :], N - M)


def run(
    program: Program,
    inputs: Mapping[str, Any],
    tensors: Sequence[Tensor] = (),
    numbers: Sequence[Any] = (),
    real: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the program's outputs.

    inputs: by name: b, h, i, j and shift, s and g where the program reads them; `numbers` are those given to the
        function.
    real: the type of floating numbers, torch.float32 or torch.float64.
    """
    types = {"f": real, "i": torch.int64, "b": torch.bool}
    device = next(iter(inputs.values())).device
    values: list[Tensor] = []
    for node, kind in zip(program.nodes, program.kinds, strict=True):
        args = [values[n] for n in operands(node)]
        match node[0]:
            case "in":
                found = inputs.get(node[1])
                if found is None:
                    found = numbers[int(node[1][1:])]
                if not isinstance(found, Tensor):
                    found = torch.tensor(found, dtype=types[kind], device=device)
            case "lit":
                found = torch.tensor(literal(node), dtype=types[kind], device=device)
            case "load":
                found = tensors[node[1]][tuple(args)].to(types[kind])
            case "cast":
                found = args[0].to(types[kind])
            case name:
                found = OPS[name].torch(*args)
        values.append(found)
    return [values[n] for n in program.outputs]


def keep(program: Program, at: Entries, tensors: Sequence[Tensor] = (), numbers: Sequence[Any] = ()) -> Tensor:
    """Return a bool tensor that broadcasts to (B, H, M, N): whether row i sees key j."""
    return run(program, at._asdict(), tensors, numbers)[0]


def apply(
    program: Program, S: Tensor, at: Entries, tensors: Sequence[Tensor] = (), numbers: Sequence[Any] = ()
) -> Tensor:
    """Return the output logits for S (B, H, M, N), in its shape and type."""
    return run(program, at._asdict() | {"s": S}, tensors, numbers, S.dtype)[0].expand(S.shape)


def zero_sums(tensors: Sequence[Tensor], real: torch.dtype) -> dict[int, Tensor]:
    """Return zeros of type `real` for each captured tensor that requires a gradient, by its place."""
    return {n: torch.zeros_like(t, dtype=real) for n, t in enumerate(tensors) if t.requires_grad}


def pull(
    program: Program,
    dS: Tensor,
    S: Tensor,
    at: Entries,
    sums: Mapping[int, Tensor],
    tensors: Sequence[Tensor] = (),
    numbers: Sequence[Any] = (),
) -> Tensor:
    """Return the gradient of the input logits S, from that of the output logits, both (B, H, M, N).

    sums: gradients of captured tensors in S's type, by their places; those of these entries are added to them.
    """
    learned = tuple(sums)
    loads = gathers(program, learned)
    derived = derivative(program.text, learned, indices=True)
    dS_in, *rest = run(derived, at._asdict() | {"s": S, "g": dS}, tensors, numbers, S.dtype)
    values, indices = rest[: len(loads)], iter(rest[len(loads) :])
    for n, value in zip(loads, values, strict=True):
        index = tuple([next(indices) for _ in operands(program.nodes[n])])
        _add(sums[program.nodes[n][1]], index, value.expand(S.shape))
    return dS_in.expand(S.shape)


def _add(total: Tensor, index: tuple[Tensor, ...], value: Tensor) -> None:
    """Add to total[index], after sums over what the index does not depend on: they are more exact, and faster."""
    if not index:
        total += value.sum()
        return
    shape = torch.broadcast_shapes(*[x.shape for x in index])
    total.index_put_(index, value.sum_to_size(shape), accumulate=True)
