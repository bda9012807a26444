"""tilewise: exact attention, one tile at a time. FlashAttention, forward and backward, in pure Python."""

from .append.api import append_
from .append.pages import copy_pages_
from .attention import reference as reference
from .attention.api import attention, attention_backward, attention_qkvpacked
from .attention.explain import Explanation, explain
from .attention.lists import listed
from .call.count import Calls, count_calls
from .host.bundle import use_bundle
from .merge.api import merge
from .rotary.api import rotary, rotary_qk
from .values.by_head import Blocks
from .values.cached import Cached
from .values.intervals import Causal, Padding, Prefix, Spans, Window
from .values.layout import Varlen
from .values.masks import Full, Mask
from .values.origin import Origin
from .values.products import EightBits
from .values.quantized import Quantized
from .values.score import Alibi, Bias, Score, SoftCap
from .values.tables import Dense, Documents
from .values.value import Unsupported
from .warm.warm import Warmed, warm

__version__ = "0.2.0"

__all__ = [
    "Alibi",
    "Bias",
    "Blocks",
    "Cached",
    "Calls",
    "Causal",
    "Dense",
    "Documents",
    "EightBits",
    "Explanation",
    "Full",
    "Mask",
    "Origin",
    "Padding",
    "Prefix",
    "Quantized",
    "Score",
    "SoftCap",
    "Spans",
    "Unsupported",
    "Varlen",
    "Warmed",
    "Window",
    "append_",
    "attention",
    "attention_backward",
    "attention_qkvpacked",
    "copy_pages_",
    "count_calls",
    "explain",
    "listed",
    "merge",
    "rotary",
    "rotary_qk",
    "use_bundle",
    "warm",
]
