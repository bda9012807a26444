"""inf and NaN in q, k or v with few rows, on a GPU: infinities reach the results that they reach in plain torch.

With few rows, gradients hold infinities of one sign that are no NaN: dK sums over the rows, so two of its terms with
unlike signs make a NaN.
"""

from itertools import product

import pytest
import torch
from conformance import rule
from conformance.cases import VALUES, Case, bf16, fp32, make

import tilewise as tw

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
KINDS = {
    "hopper bf16": ("hopper", bf16, None), "hopper bf16x6": ("hopper", fp32, "bf16x6"),
    "hopper fp16x3": ("hopper", fp32, "fp16x3"), "triton bf16": ("triton", bf16, None),
    "triton bf16x6": ("triton", fp32, "bf16x6"), "triton ieee": ("triton", fp32, "ieee"),
}  # fmt: skip
NOT_FINITE = [name for name in VALUES if "in" in name.split()]


def differences(got, true):
    """Describe the entries of another kind than the truth."""
    told = []
    for name, t in true.items():
        x = got[name]
        wrong = (rule._kind(x) != rule._kind(t)).nonzero()
        places = [f"{at.tolist()}: {x[tuple(at)].item()}, not {t[tuple(at)].item()}" for at in wrong[:6]]
        told += [f"{name}, {len(wrong)} of {t.numel()}: {'; '.join(places)}"] if places else []
    return told


def infinities(name, M):
    """How many entries of all true gradients are infinite."""
    case = Case(f"{name}, {M} rows", M=M, N=7, dtype=fp32, values=name, loss="o")
    return sum(int(t.isinf().sum()) for result, t in rule.truth(case, make(case, "cpu")).items() if result[0] == "d")


def test_the_cases_have_infinite_gradients():
    assert infinities("inf in v", 4) > 0


@on_gpu
@pytest.mark.parametrize("values", NOT_FINITE)
@pytest.mark.parametrize("kind", KINDS)
def test_infinities_reach_what_they_reach_in_torch(kind, values):
    backend, dtype, precision = KINDS[kind]
    told = []
    for M, D in product((4, 5, 33), (16, 64, 128)):
        name = f"{values}, {M} rows"
        case = Case(name, M=M, N=7, D=D, dtype=dtype, values=values, loss="o", precision=precision)
        call = make(case, "cuda")
        reasons = tw.explain(call.q, call.k, call.v, **rule.options(case, call, backend)).refusals[backend]
        if reasons:
            pytest.skip("; ".join(reasons))
        told += [
            f"{M} rows, D {D}: {line}" for line in differences(rule.run(case, call, backend), rule.truth(case, call))
        ]
    assert not told, "\n".join(told)
