"""Head sizes above 256 in Triton's interpreter, with the tiles that GPUs have for them: down to 8 rows or columns."""

from dataclasses import replace

import pytest
import torch
from conformance import rule
from conformance.cases import Case, alibi, bias, both, causal, dense, make, padding

pytest.importorskip("triton")
import triton

from tilewise.call import calls
from tilewise.triton import tiles

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter"),
]

KINDS = [(kind, size) for kind in ("hopper", "ampere", "other") for size in (2, 4)]
WIDE = Case("", B=1, M=41, N=70, D=512)
CASES = (
    replace(WIDE, name="causal, GQA", H=4, mask=causal),
    replace(WIDE, name="D_v, sink, dropout, padding", D=320, D_v=24, sink=torch.float32, dropout=0.2,
            mask=both(causal, padding)),
    replace(WIDE, name="bias, alibi, dense", B=2, M=20, N=37, D=511, score=(bias("HMN"), alibi()), mask=dense("MN")),
)  # fmt: skip


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} {8 * kind[1]}-bit")
def chip(request, monkeypatch):
    """The interpreter with a chip's rows."""
    name, size = request.param
    for table in (*tiles.TABLES.values(), tiles.BIAS):
        for key in [key for key in table if key[:3] == (name, size, 512)]:
            monkeypatch.setitem(table, ("interpreter", 4, 512, *key[3:]), table[key])
    calls.forget()
    yield request.param
    calls.forget()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_chips_tiles_are_as_accurate_as_torch(case, chip):
    case = replace(case, precision="ieee" if chip[1] == 4 else None)
    call = make(case, "cpu")
    true = rule.truth(case, call)
    rule.assert_as_accurate_as_torch(rule.run(case, call, "triton"), true, rule.bounds(case, call, true))
