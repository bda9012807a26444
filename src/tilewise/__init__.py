"""tilewise: exact attention, one tile at a time. FlashAttention, forward and backward, in pure Python."""

from .api import attention, attention_backward, attention_qkvpacked
from .count import Calls, count_calls
from .explain import Explanation, explain
from .layout import Varlen
from .listed import listed
from .mask import Causal, Dense, Documents, Full, Mask, Padding, Prefix, Spans, Window
from .merge import merge
from .place import Origin
from .problem import Unsupported
from .rotary import rotary, rotary_qk
from .score import Alibi, Bias, Score, SoftCap
from .warm import Warmed, warm

__version__ = "0.2.0"

__all__ = [
    "Alibi",
    "Bias",
    "Calls",
    "Causal",
    "Dense",
    "Documents",
    "Explanation",
    "Full",
    "Mask",
    "Origin",
    "Padding",
    "Prefix",
    "Score",
    "SoftCap",
    "Spans",
    "Unsupported",
    "Varlen",
    "Warmed",
    "Window",
    "attention",
    "attention_backward",
    "attention_qkvpacked",
    "count_calls",
    "explain",
    "listed",
    "merge",
    "rotary",
    "rotary_qk",
    "warm",
]
