"""Solutions of page 1's exercises."""

import math

import torch


def four_passes(Q, K, V):
    return torch.softmax(Q * Q.shape[-1] ** -0.5 @ K.mT, -1) @ V


def highest_intensity(d, size):
    return 4 * d / (12 * size)


def largest_logit(largest, keys):
    return math.log(largest / keys)
