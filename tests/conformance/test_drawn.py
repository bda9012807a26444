"""Cases drawn at random, on the fastest back end for each and on one more.

    TILEWISE_DRAWN=500:200 python -m pytest tests/conformance/test_drawn.py

runs cases 500 to 699. A number always draws the same case, and a failure tells it.
"""

import os

import pytest
import torch

import tilewise as tw

from . import rule
from .cases import make
from .drawn import drawn
from .test_conformance import chosen

GPU = torch.cuda.is_available()
FIRST, COUNT = (int(part) for part in os.environ.get("TILEWISE_DRAWN", "0:100" if GPU else "0:20").split(":"))


@pytest.mark.parametrize("backend", [None, "triton" if GPU else "cpu-tiled"], ids=str)
@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_as_accurate_as_torch_and_repeatable(number, backend):
    case = drawn(number, "large" if GPU else "tiny")
    call = make(case, "cuda" if GPU else "cpu")
    with chosen(backend or "") as name:
        given = rule.options(case, call, name or None)
        told = tw.explain(call.q, call.k, call.v, score=call.score, sink=call.sink, **given)
        if told.backend is None:
            pytest.skip(f"{case}: {told}")
        true = rule.truth(case, call)
        first, again = rule.run(case, call, name or None), rule.run(case, call, name or None)
    try:
        rule.assert_as_accurate_as_torch(first, true, rule.bounds(case, call, true))
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None
    for result in ("o", "lse", "dk", "dv", *(["dq"] if case.deterministic or not GPU else [])):
        assert torch.equal(first[result], again[result]), f"{case}: {result} differs when run again"
