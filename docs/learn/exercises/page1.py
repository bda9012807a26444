"""Exercises of page 1: standard attention and its memory traffic.

python -m pytest docs/learn/exercises/test_page1.py
"""

import torch


def four_passes(Q, K, V) -> torch.Tensor:
    """O of full attention, (heads, N, d), moving little more than four times N x N numbers a head instead of twelve.

    All of it is PyTorch, with no loop. Two of the four are what the matrix products themselves write and read.
    """
    raise NotImplementedError


def highest_intensity(d, size) -> float:
    """What the operations per byte of standard attention tend to, as M and N grow; a number has `size` bytes."""
    raise NotImplementedError


def largest_logit(largest, keys) -> float:
    """The largest x for which a softmax without m is safe: e^x and a sum of `keys` of them are at most `largest`."""
    raise NotImplementedError
