"""Precision of fp32 products on the CPU.

Torch has one setting for all threads. A call changes it under a lock, so only one call computes at a time.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any

import torch

FORK_SECONDS = 1.0
"""The longest time that a fork waits for a call in another thread."""

mkldnn = torch.backends.mkldnn
PRECISION: Any = torch._C._get_fp32_precision_getter


class Setting:
    """Torch's setting, with a lock held by the thread that changes it.

    A fork waits for the lock, at most FORK_SECONDS. Otherwise the child would copy torch while another thread is in the
    middle of a call. That thread does not exist in the child, which gets a new lock and the user's setting.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.of_user: str | None = None
        """The user's setting, to be restored; None unless a call has changed it."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
            )

    @contextmanager
    def at(self, precision: str) -> Iterator[None]:
        """Hold the lock, with fp32 products of this precision."""
        with self.lock:
            before = mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
            if before == mkldnn.fp32_precision:  # type: ignore[attr-defined]
                before = "none"  # so that it follows the general setting again
            outer, self.of_user = self.of_user, self.of_user or before
            mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
            try:
                yield
            finally:
                mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]
                self.of_user = outer

    def inexact(self) -> bool:
        """Tell whether fp32 products are not those of plain fp32. Ask with the lock."""
        return PRECISION("mkldnn", "matmul") not in ("none", "ieee")

    def _before_fork(self) -> None:
        self.lock.acquire(timeout=FORK_SECONDS)

    def _after_in_parent(self) -> None:
        with suppress(RuntimeError):  # the wait timed out: another thread has the lock
            self.lock.release()

    def _after_in_child(self) -> None:
        self.lock = RLock()
        if self.of_user is not None:
            mkldnn.matmul.fp32_precision = self.of_user  # type: ignore[attr-defined]
            self.of_user = None


SETTING = Setting()


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Make fp32 products exact for inputs of this type.

    bf16 inputs, widened to fp32, lose nothing in oneDNN's bf16 products with fp32 sums, which are twice as fast. P and
    dS are rounded to bf16 before a product, as on every matrix unit.
    """
    with SETTING.at("bf16" if dtype == torch.bfloat16 else "ieee"), torch.autocast("cpu", enabled=False):
        yield
