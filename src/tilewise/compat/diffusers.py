"""tilewise as an attention backend of Hugging Face diffusers.

    from tilewise.compat.diffusers import install
    install()
    model.set_attention_backend("tilewise")

diffusers finds backends in an enumeration of names and a table of functions. `install` adds an entry to both.
"""

from typing import Any

from torch import Tensor

from ..attention.api import attention
from .sdpa import mask_and_score

__all__ = ["install", "uninstall"]

NAME = "tilewise"
MEMBER = NAME.upper()


def install() -> None:
    """Register tilewise with diffusers, so that `set_attention_backend("tilewise")` works in this process.

    A second call changes nothing. Raises ImportError if diffusers is absent or too old.
    """
    names, registry = _tables()
    if MEMBER in names.__members__:
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_, member.__objclass__ = MEMBER, NAME, names
    member._sort_order_ = len(names.__members__)
    names._member_names_.append(MEMBER)
    names._member_map_[MEMBER] = names._value2member_map_[NAME] = member
    type.__setattr__(names, MEMBER, member)  # an enumeration takes new members in no other way
    registry.register(member)(attend)


def uninstall() -> None:
    """Take out what `install` registered; nothing of it stays. Raises ImportError as `install`.

    diffusers' active backend becomes "native" if it was tilewise. Before, call `reset_attention_backend()` of models
    that were set to it.
    """
    names, registry = _tables()
    member = names.__members__.get(MEMBER)
    if member is None:
        return
    if registry._active_backend is member:
        registry.set_active_backend(names.NATIVE)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        del table[member]
    names._member_names_.remove(MEMBER)
    del names._member_map_[MEMBER], names._value2member_map_[NAME]
    type.__delattr__(names, MEMBER)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Compute what diffusers' backend "native" does, with its arguments.

    query, key and value are (B, length, H, D). attn_mask has bools (True: the key counts) or numbers to add to the
    logits, broadcast to (B, H, M, N), or one for each key, (B, N). With is_causal, query i sees the keys to i, where
    M <= N. return_lse adds the logsumexp (B, M, H) in fp32. Raises ValueError for context parallelism, and for
    is_causal with a mask or M > N; and what `tilewise.attention` raises.
    """
    if _parallel_config is not None:
        raise ValueError(
            "_parallel_config must be None, got context parallelism; call set_attention_backend('native') for it"
        )
    M, N = query.shape[1], key.shape[1]
    if is_causal and (attn_mask is not None or M > N):
        given = "a mask" if attn_mask is not None else f"{M} queries and {N} keys"
        raise ValueError(
            f"is_causal must come without a mask and with at most as many queries as keys, got {given}; give the "
            "whole mask in attn_mask"
        )
    if is_causal:  # PyTorch aligns the first query with the first key, so that no query sees the others
        key, value = key[:, :M], value[:, :M]
    if attn_mask is not None and attn_mask.shape == (query.shape[0], N):
        attn_mask = attn_mask[:, None, None]
    mask, score = mask_and_score(attn_mask, is_causal)
    options = {"mask": mask, "score": score, "scale": scale, "dropout": dropout_p}
    if not return_lse:
        return attention(query, key, value, **options)
    o, lse = attention(query, key, value, return_lse=True, **options)
    return o, lse.transpose(1, 2)


def _tables() -> Any:
    """Return diffusers' enumeration of backends, and the class with its tables."""
    try:
        from diffusers.models import attention_dispatch
    except ImportError as missing:
        raise ImportError("diffusers cannot be imported; install tilewise[integrations]") from missing
    return attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
