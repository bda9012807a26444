"""One call with given head sizes, on a GPU: o, lse and all gradients, by the rule of the conformance tests."""

import pytest
import torch
from conformance import rule
from conformance.cases import Case, bf16, causal, fp16, fp32, make

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
TYPES = {"fp16": fp16, "bf16": bf16, "fp32": fp32}


def check(backend: str, D: int, D_v: int, dtype: torch.dtype, **more: str) -> None:
    """One call, forward and backward, with whole tiles and with ragged ones."""
    name = f"{backend} D {D} D_v {D_v} {dtype} {more}"
    case = Case(name, B=1, M=200, N=200, D=D, D_v=D_v, dtype=dtype, mask=causal, size="large", **more)
    call = make(case, "cuda")
    true = rule.truth(case, call)
    rule.assert_as_accurate_as_torch(rule.run(case, call, backend), true, rule.bounds(case, call, true))
