"""Torch has one setting for the precision of products, for all threads: a call that changes it computes alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock

import torch

FORK_SECONDS = 1.0
"""How long a fork waits for the call that another thread is in, at most."""

mkldnn = torch.backends.mkldnn


class Setting:
    """The setting, and the lock of whoever changes it.

    A fork waits for the lock, as the child would go on with a torch that another thread was in the middle of; but no
    longer than FORK_SECONDS. That thread does not exist in the child: the lock there is new, and the setting put back.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.of_user: str | None = None
        """What is put back, while the setting is a call's."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
            )

    @contextmanager
    def at(self, precision: str) -> Iterator[None]:
        """Alone, with fp32 products of this precision."""
        with self.lock:
            before = mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
            if before == mkldnn.fp32_precision:  # type: ignore[attr-defined]
                before = "none"  # so it goes on to follow that one
            outer, self.of_user = self.of_user, self.of_user or before
            mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
            try:
                yield
            finally:
                mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]
                self.of_user = outer

    def _before_fork(self) -> None:
        self.lock.acquire(timeout=FORK_SECONDS)

    def _after_in_parent(self) -> None:
        with suppress(RuntimeError):  # it waited in vain: the lock is another thread's
            self.lock.release()

    def _after_in_child(self) -> None:
        self.lock = RLock()
        if self.of_user is not None:
            mkldnn.matmul.fp32_precision = self.of_user  # type: ignore[attr-defined]
            self.of_user = None


SETTING = Setting()


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """fp32 products as they are. bf16 inputs, widened to fp32, lose nothing in oneDNN's bf16 products with fp32 sums,
    which are twice as fast; P and dS are rounded to bf16 on the way in, as on every matrix unit."""
    with SETTING.at("bf16" if dtype == torch.bfloat16 else "ieee"), torch.autocast("cpu", enabled=False):
        yield
