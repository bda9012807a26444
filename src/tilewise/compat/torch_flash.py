"""Offer tilewise to PyTorch as an implementation of its flash attention, for torch.nn.attention.varlen.varlen_attn.

    from torch.nn.attention import activate_flash_attention_impl
    from tilewise.compat import torch_flash

    torch_flash.register()
    activate_flash_attention_impl("tilewise")

From then on packed sequences run on tilewise, with their gradients, and for inference those that use `seqused_k` keys
of their own, or of pages by `block_table`; restore_flash_attention_impl() ends it. PyTorch's own kernel computes what
tilewise has no name for: dropout, ALiBi, and calls that no back end takes. Rows that see no key have lse = -inf.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.api import with_defaults
from ..attention.eager import attend, attend_backward
from ..call import calls
from ..call.backend import select
from ..call.check import check_arguments, check_results
from ..call.count import COUNTING, count_fell_back
from ..call.operands import Operands, Saved
from ..call.recipe import Recipe
from ..values.layout import Layout, Varlen
from .flash_attn.arguments import options
from .flash_attn.cache import cached_parts
from .sdpa import check_devices

__all__ = ["register"]

FORWARD = torch.ops.aten._flash_attention_forward.default
BACKWARD = torch.ops.aten._flash_attention_backward.default
SELECT = torch._C.DispatchKey.BackendSelect
"""The key by which calls on all devices pass, and under which PyTorch has no kernel of these operators."""
INVARIANT = 1024
"""Keys of a piece where a call wants the same bits in any batch."""


def register(name: str = "tilewise", devices: Sequence[str] = ("cuda",)) -> None:
    """Register tilewise under a name that torch.nn.attention.activate_flash_attention_impl takes.

    `devices`, whose calls to take, are some of "cuda" (also ROCm's) and "cpu". Raises ValueError for another one, and
    RuntimeError where PyTorch has no such registry; 2.11 and newer have it.
    """
    taken = check_devices(devices)
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise RuntimeError(f"PyTorch {torch.__version__} has no registry of flash attention; install 2.11 or newer")
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: Handle(taken))


class Handle:
    """Override both operators until `remove`."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl(FORWARD, self.forward, "BackendSelect", with_keyset=True)
        self.library.impl(BACKWARD, self.backward, "BackendSelect", with_keyset=True)

    def remove(self) -> None:
        """Give the operators back to PyTorch."""
        self.library._destroy()

    def forward(self, keys: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> Any:
        """Compute `_flash_attention_forward`, here or there."""
        *call, return_debug_mask = args
        given = "return_debug_mask" if return_debug_mask else self.translated(q, k, v, *call, **named)
        if not isinstance(given, str):
            x, recipe, longest = given
            o, lse = attend((*x[:3], *x.extra), None, calls.Call(recipe, longest))
            return o, lse, torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0), q.new_empty(0)
        if COUNTING and q.device.type in self.devices:
            count_fell_back(given)
        return FORWARD.redispatch(keys.remove(SELECT), q, k, v, *args, **named)

    def backward(
        self, keys: Any, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *args: Any, **named: Any
    ) -> Any:
        """Compute `_flash_attention_backward` of what `forward` has taken."""
        given = self.translated(q, k, v, *args[:-2], **named)
        if not isinstance(given, str):
            x, recipe, longest = given
            check_results(x, recipe, do=do, o=o, lse=lse, dlse=None, delta=None)
            wanted = (False,) * len(x.extra)
            saved = Saved(o.contiguous(), lse)
            return attend_backward((*x[:3], *x.extra), saved, do, None, recipe, longest, wanted)[:3]
        return BACKWARD.redispatch(keys.remove(SELECT), do, q, k, v, o, lse, *args, **named)

    def translated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
        **unknown: Any,
    ) -> tuple[Operands, Recipe, tuple[int, int]] | str:
        """Return a call in tilewise's terms, or why it falls back. num_splits is a hint, and ignored, but 1 with
        `seqused_k` promises the same bits in any batch."""
        if q.device.type not in self.devices:
            return "another device"
        if named := [name for name, value in unknown.items() if value is not None]:
            return " and ".join(named)
        if block_table is not None and seqused_k is None:
            return "block_table without seqused_k"
        if dropout_p or cum_seq_q is None or (cum_seq_k is None and block_table is None):
            return "dropout, or sequences that are not packed"
        chosen = options(scale, is_causal, (window_size_left, window_size_right), softcap=0.0)
        try:
            if seqused_k is None and cum_seq_k is not None:
                layout: Layout = Varlen(cum_seq_q, cum_seq_k, max_q, max_k)
            else:
                k, v, cached = cached_parts(k, v, cum_seq_q, cum_seq_k, max_q, seqused_k, block_table)
                layout = replace(cached, invariant=INVARIANT if num_splits == 1 else 0)
            every = with_defaults("attention", chosen._replace(layout=layout)._asdict())
            del every["seed"], every["return_lse"]
            call = check_arguments(q, k, v, **every)
            select(calls.problem_of(*call))
        except (TypeError, ValueError) as error:
            return str(error).partition(";")[0]
        return call
