"""Masks read back into values: the same as drawn ones, with one read of the device, and nothing of M x N entries."""

import gc
import threading
from itertools import product

import pytest
import torch
from compat.transformers.models import forward, inputs, make, transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils as hf

import tilewise as tw
from tilewise.compat.transformers import MaskView, view
from tilewise.compat.transformers.masks import mask_of, pattern_of, read

LEFT = torch.tensor([3, 0])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 3]]).expand(2, -1)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 0]]).expand(2, -1)
FUNCTIONS = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(4),
    "bidirectional window": hf.sliding_window_bidirectional_mask_function(2),
    "chunks": hf.chunked_causal_mask_function(5, LEFT),
}
INSIDE = ("causal", "window", "chunks")


def packed(function):
    """What transformers makes of a function for packed sequences; 5.23 maps positions besides."""
    if hasattr(hf, "packed_sequence_compatibility_function"):
        return hf.packed_sequence_compatibility_function(function, POSITIONS, PACKED)
    return hf.and_masks(hf.packed_sequence_mask_function(PACKED), function)


FUNCTIONS |= {f"packed {name}": packed(FUNCTIONS[name]) for name in INSIDE[:2]}
FUNCTIONS["packed chunks"] = packed(hf.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.int64)))
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, 1, *[-1] * 11]]).expand(2, -1)
OTHERS = {
    "causal, and two keys": lambda b, h, i, j: (j <= i) | (j < 2),
    "blocks of images": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(IMAGES)),
    "a window of none": hf.sliding_window_causal_mask_function(0),
}
"""Functions that are not read back by their names: they become programs."""
REAL = {
    "whole": torch.ones(2, 12, dtype=torch.bool),
    "right": torch.arange(12) < torch.tensor([[7], [12]]),
    "left": torch.arange(12) >= torch.tensor([[3], [0]]),
    "holes": torch.arange(12) % torch.tensor([[3], [5]]) != 1,
    "none": None,
}
PLACES = {  # q_length, kv_length, q_offset, kv_offset
    "whole": (12, 12, 0, 0),
    "continued": (5, 12, 7, 0),
    "cropped": (5, 9, 7, 3),
    "static": (5, 20, 7, 0),
    "counted on the device": (5, 20, torch.tensor(7), 0),
}
EVERY = FUNCTIONS | OTHERS
WAYS = [(name, place) for name, place in product(EVERY, PLACES) if place == "whole" or "packed" not in name]
"""transformers packs only where there is no cache: queries and keys are the same tokens."""


def asked(function, place, real):
    M, N, q_offset, kv_offset = PLACES[place]
    return mask_of(2, M, N, q_offset, kv_offset, EVERY[function], REAL[real])


@pytest.mark.parametrize(("function", "place"), WAYS)
def test_values_say_what_the_drawn_mask_says(function, place):
    for real in ("none",) if function.startswith("packed") else REAL:
        found = asked(function, place, real)
        drawn = found._draw()
        mask, keys, _ = found.values()
        assert not any(isinstance(part, tw.Dense) for part in mask.parts)
        seen = mask.dense(found.shape[2], keys, 2)
        seen = torch.broadcast_to(seen, (2, 1, found.shape[2], keys))
        assert torch.equal(torch.nn.functional.pad(seen, (0, drawn.shape[3] - keys)), drawn), real


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "chunks" not in name and "packed" not in name])
def test_padding_on_either_side_is_an_interval(function):
    for side in ("left", "right"):
        assert all(part.interval for part in asked(function, "whole", side).values().mask.parts)
    assert not any(isinstance(part, tw.Padding) for part in asked(function, "whole", "whole").values().mask.parts)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_compiled_mask_has_the_pattern_that_closures_spell(function):
    chunked = "chunks" in function
    config = transformers.LlamaConfig(attention_chunk_size=5 if chunked else None)
    local = 5 if chunked else 4 if "window" in function else None
    bidirectional = "bidirectional" in function
    local = 2 if bidirectional and local else local
    skip = "packed" not in function
    known, wanted = pattern_of(FUNCTIONS[function], local, config, skip, bidirectional), read(FUNCTIONS[function])
    assert (known.packed, known.chunked) == (wanted.packed, wanted.chunked)
    assert set(wanted.intervals) <= set(known.intervals)
    assert set(known.intervals) - set(wanted.intervals) <= ({tw.Window(4, None)} if chunked else set())


NEAR = torch.arange(24)[:, None] - torch.arange(3)


def any_of_three(b, h, i, j):
    return (NEAR[i] == j).any()


def test_functions_that_no_program_can_be_are_drawn_on_first_use_with_a_warning():
    view._warned.clear()
    found = mask_of(2, 12, 12, 0, 0, any_of_three, REAL["left"], use_vmap=True)
    with pytest.warns(UserWarning, match="no value for .*any_of_three") as caught:
        mask = found.values().mask
    assert isinstance(mask, tw.Dense)
    assert len(caught) == 1
    drawn = hf.sdpa_mask(2, 12, 12, 0, 0, any_of_three, REAL["left"], allow_is_causal_skip=False, use_vmap=True)
    assert torch.equal(mask.seen, drawn)
    mask_of(2, 12, 12, 0, 0, any_of_three, use_vmap=True).values()
    unused = mask_of(2, 12, 12, 0, 0, hf.sliding_window_causal_mask_function(0))
    assert unused._drawn is None


class Counted(TorchDispatchMode):
    """Counts operators, and the largest tensor that one gives."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += 1
        sizes = [t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["causal", "sliding_window_causal"])
def test_the_mask_of_4096_tokens_takes_forty_operators_and_no_square(kind, side):
    config = transformers.MistralConfig(sliding_window=1024, attn_implementation="tilewise")
    real = torch.ones(2, 4096, dtype=torch.int64)
    real[0, : 100 if side == "left" else -100] = 0
    real = real if side == "left" else real.flip(1)
    tokens = torch.empty(2, 4096, 8)
    with Counted() as counted:
        found = getattr(hf, f"create_{kind}_mask")(config, tokens, real, None)
        found.values()
    assert isinstance(found, MaskView)
    assert counted.count <= 40
    assert counted.largest <= tokens.numel()


@pytest.mark.parametrize(("name", "reads"), [("gemma3", 1), ("llama", 1), ("modernbert", 1), ("t5", 2)])
def test_a_forward_reads_the_device_once(name, reads, monkeypatch):
    """All kinds of layers together; an encoder and a decoder are two forwards."""
    seen = []
    for method in ("tolist", "item", "__bool__", "__int__", "__index__"):
        ask = getattr(torch.Tensor, method)
        monkeypatch.setattr(torch.Tensor, method, lambda self, ask=ask: seen.append(1) or ask(self))
    settle, counts = view._settle, []

    def counted(found):
        before = len(seen)
        settle(found)
        counts.append(len(seen) - before)

    monkeypatch.setattr(view, "_settle", counted)
    model = make(name)
    model.set_attn_implementation("tilewise")
    forward(model, inputs(name, "left"))
    assert sum(counts) == reads


def test_a_view_is_the_tensor_for_who_asks():
    view._warned.clear()
    found = asked("causal", "whole", "left")
    assert (found.ndim, found.shape, len({found})) == (4, (2, 1, 12, 12), 1)
    assert (found.dtype, found.dim(), found.size(), found.size(-1)) == (torch.bool, 4, (2, 1, 12, 12), 12)
    assert found.contiguous() is found
    assert found._drawn is None
    assert found.to("cpu").values().mask.parts[1].starts.tolist() == [3, 0]
    with pytest.warns(UserWarning, match="drawn"):
        drawn = found.tensor()
    assert found.device == drawn.device
    assert torch.equal(found[:, :, 3:5], drawn[:, :, 3:5])
    assert torch.equal(torch.cat([found, drawn], -1), torch.cat([drawn, drawn], -1))
    assert torch.equal(found & drawn, drawn)
    assert torch.equal(~found, ~drawn)
    assert not found.to("meta").tensor().is_floating_point()
    with pytest.raises(AttributeError, match="nonsense"):
        _ = found.nonsense
    for add in (lambda: torch.zeros(2, 1, 12, 12) + found, lambda: found + torch.zeros(2, 1, 12, 12)):
        with pytest.raises(tw.Unsupported, match="eager"):
            add()


def test_views_of_another_thread_and_views_that_are_gone_are_no_matter():
    made = []
    thread = threading.Thread(target=lambda: made.append(asked("causal", "whole", "right")))
    thread.start()
    thread.join()
    gone = asked("causal", "whole", "left")
    kept = asked("window", "whole", "left")
    del gone
    gc.collect()
    assert made[0].values().mask.parts[0] == tw.Causal()
    assert kept.values().keys == 12
    assert not view._waiting.views
