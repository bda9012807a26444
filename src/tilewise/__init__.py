"""tilewise: exact attention, one tile at a time. FlashAttention, forward and backward, in pure Python."""

from .api import attention, attention_backward, attention_qkvpacked
from .append import append_, copy_pages_
from .count import Calls, count_calls
from .explain import Explanation, explain
from .layout import Cached, Varlen
from .listed import listed
from .mask import Causal, Dense, Documents, Full, Mask, Padding, Prefix, Spans, Window
from .merge import merge
from .place import Origin
from .problem import Unsupported
from .quantized import EightBits, Quantized
from .rotary import rotary, rotary_qk
from .score import Alibi, Bias, Score, SoftCap
from .warm import Warmed, warm

__version__ = "0.2.0"

__all__ = [
    "Alibi",
    "Bias",
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
    "warm",
]
