"""tilewise.parallel: attention of one sequence over many ranks, on torch.distributed, with any mask.

import tilewise.parallel as tp
s = tp.Zigzag(group)
o = tp.attention(q, k, v, sharding=s, mask=tilewise.Causal())  # q, k, v: this rank's rows, s.shard(...)
"""

from . import dtensor as dtensor
from .api import Explanation, attention, explain, using
from .costs import Cluster, Cost, fit
from .exchange import count_bytes
from .held import fixed
from .plans import Grid
from .shardings import Balanced, Contiguous, Sharding, Striped, Zigzag

__all__ = [
    "Balanced",
    "Cluster",
    "Contiguous",
    "Cost",
    "Explanation",
    "Grid",
    "Sharding",
    "Striped",
    "Zigzag",
    "attention",
    "count_bytes",
    "explain",
    "fit",
    "fixed",
    "using",
]
