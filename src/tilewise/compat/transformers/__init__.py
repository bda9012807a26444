"""tilewise as an attention implementation of Hugging Face transformers.

    from tilewise.compat.transformers import install
    install()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilewise")

Two functions are registered under one name. One is called once per forward and kind of layer: it reads transformers'
masks back into tilewise's values, so that no mask of all queries and keys is made. The other computes a layer.
"""

from inspect import signature

from .layer import attend
from .masks import mask_of
from .precision import set_precision
from .view import MaskView

__all__ = ["MaskView", "install", "set_precision", "uninstall"]


def install(name: str = "tilewise") -> None:
    """Register tilewise with transformers, so that `attn_implementation=name` works in this process.

    Processes that are spawned call it, too. A second call changes nothing. Raises TypeError or ValueError for a name
    that cannot be used, ImportError if transformers is absent or too old.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}; leave it out for 'tilewise'")
    # transformers takes these for packages, hub kernels and paged caches
    if not name or any(part in name for part in ("flash", "/", "|")):
        raise ValueError(f"name must be a word without 'flash', '/' and '|', got {name!r}; leave it out for 'tilewise'")
    layers, masks = _registries()
    if name == "eager" or layers.get(name, attend) is not attend or masks.get(name, mask_of) is not mask_of:
        raise ValueError(f"name must be free, got {name!r}, which transformers has; leave it out for 'tilewise'")
    layers[name], masks[name] = attend, mask_of


def uninstall(name: str = "tilewise") -> None:
    """Take out what `install(name)` registered; nothing of it stays.

    Raises ValueError for a name under which tilewise is not installed, ImportError as `install`.
    """
    layers, masks = _registries()
    if layers.get(name) is not attend:
        ours = ", ".join(repr(taken) for taken, function in layers.items() if function is attend) or "none"
        raise ValueError(f"name must be one that is installed ({ours}), got {name!r}; call install first")
    del layers[name], masks[name]


def _registries() -> tuple[dict, dict]:
    """Return transformers' global tables of attention and of mask functions."""
    try:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface
    except ImportError as missing:
        raise ImportError("transformers cannot be imported; install tilewise[integrations]") from missing
    if "q_offset" not in signature(sdpa_mask).parameters:
        raise ImportError(f"transformers {transformers.__version__} is too old; install tilewise[integrations]")
    return AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
