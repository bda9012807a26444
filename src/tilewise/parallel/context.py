"""A sharding for models whose attention is called from inside: those of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..compat.transformers.view import SHARDED
from ..values.masks import Full, Mask
from .api import attention
from .plans import Plan
from .shardings import Sharding, refuse_sharding

FULL = Full()


@contextmanager
def using(sharding: Sharding, plan: Plan | None = None, mask: Mask = FULL) -> Iterator[None]:
    """Have the layers of a model of transformers compute attention of sharded rows, inside the context.

    The model is made with attn_implementation="tilewise". It gets this rank's tokens, and position_ids from
    `sharding.positions(length)`. Labels are shifted before they are sharded, since a rank's next row is not its next
    token. Layers keep their windows, sinks and caps. Leave attention_mask out, and pass use_cache=False.

    Args:
        sharding, plan: as for `tilewise.parallel.attention`.
        mask: the whole's, beside that of each layer: Documents or Spans of packed rows.

    Raises:
        TypeError: sharding is none. Unsupported, in a layer: padding, chunks, caches and drawn masks.
    """
    refuse_sharding(sharding)

    def layer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        options["mask"] = options["mask"] & mask
        return attention(q, k, v, sharding=sharding, plan=plan, **options)

    SHARDED.append(layer)
    try:
        yield
    finally:
        SHARDED.pop()
