import math
from itertools import pairwise

import fp8
import naive
import page4
import pytest
import torch
from traffic import Lines


@pytest.mark.parametrize("tiles", [1, 5])
@pytest.mark.parametrize(("multiply", "exponentiate"), [(512, 512), (1024, 512), (512, 700)])
def test_in_turns(tiles, multiply, exponentiate):
    cycles = {"multiply": multiply, "exponentiate": exponentiate}
    schedule = page4.in_turns(tiles, multiply, exponentiate)
    start = {(unit, group, tile): at for unit, group, tile, at in schedule}
    assert start.keys() == {(unit, group, tile) for unit in cycles for group in (0, 1) for tile in range(tiles)}
    assert len(schedule) == len(start), "a task stands twice in it"
    for (unit, group, tile), at in start.items():
        if unit == "exponentiate":
            assert at >= start["multiply", group, tile] + multiply
        else:
            assert at >= (start["exponentiate", group, tile - 1] + exponentiate if tile else 0)
    for unit, length in cycles.items():
        times = sorted(at for (of, _, _), at in start.items() if of == unit)
        assert all(a + length <= b for a, b in pairwise(times)), f"two tasks at once: {unit}"
    # the slower unit never rests, but for the first or the last task of the other one
    best = 2 * tiles * max(multiply, exponentiate) + min(multiply, exponentiate)
    assert max(at + cycles[unit] for (unit, _, _), at in start.items()) <= best


def test_pipelined():
    Q, K, V = torch.randn(3, 2, 64, 16)
    order = []

    def product(name, A, B):
        order.append(name)
        return A @ B

    with Lines() as lines:
        O = page4.pipelined(product, Q, K, V, 16)
    torch.testing.assert_close(O, naive.attention(Q, K, V), rtol=1e-4, atol=1e-5)
    assert order == ["S", "S", "PV", "S", "PV", "S", "PV", "PV"]
    assert [name for name, _ in lines.moved].count("bmm") == len(order), "a product that `product` has not made"


@pytest.mark.parametrize("d", [1, 64, 256])
def test_hadamard(d):
    X = torch.randn(3, 20, d, dtype=torch.float64)
    R = fp8.rotation(d, torch.Generator().manual_seed(0))
    signs = R[:, 0] * math.sqrt(d)  # the first column of H is all ones
    with Lines() as lines:
        got = page4.hadamard(X * signs)
    torch.testing.assert_close(got, X @ R)
    assert not any("mm" in name for name, _ in lines.moved), "a matrix product"
    assert sum(moved for _, moved in lines.moved) <= 10 * X.nbytes * (1 + math.log2(d)), "more than d log d"
