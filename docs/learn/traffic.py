"""Counts the bytes that code moves, by watching it run: the article's pages and pictures use it on examples/minimal.

`Lines` believes that every operation of torch reads its operands from slow memory and writes its result there, as
standard attention on a GPU does. `Slow` marks tensors that live in slow memory: a slice taken from one is read, a slice
assigned to one is written, and everything in between stays on the chip, as in a fused kernel.
"""

from collections import Counter
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Lines(TorchDispatchMode):
    """While it is on, `moved` collects (operation, bytes) in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name != "_unsafe_view":  # a transpose or a slice moves nothing
            touched = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.moved.append((name, sum(t.nbytes for t in touched)))
        return out


class Slow(torch.Tensor):
    """A tensor in slow memory. `traffic` counts the bytes of all of them."""

    traffic: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.__getitem__:
            cls.traffic["read"] += out.nbytes
            return out.as_subclass(torch.Tensor)  # now it is on the chip
        if func is torch.Tensor.__setitem__:
            whole, part, _ = args
            cls.traffic["written"] += whole.as_subclass(torch.Tensor)[part].nbytes
        return out


def counted(attention: Any, *inputs: torch.Tensor, **how: Any) -> int:
    """The bytes that a loop over tiles reads from slow memory and writes to it."""
    Slow.traffic.clear()
    attention(*(t.as_subclass(Slow) for t in inputs), **how)
    return sum(Slow.traffic.values())
