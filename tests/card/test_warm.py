"""What is warmed in one process is found by the first call of the next, on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise as tw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="calls on a GPU need one")

CASES = {
    "hopper": {"backend": "hopper", "dtype": torch.bfloat16},
    "hopper fp32": {"backend": "hopper", "dtype": torch.float32},
    "triton": {"backend": "triton", "dtype": torch.float16},
    "triton fp32": {"backend": "triton", "dtype": torch.float32},
}
SHAPE = 2, 512, 4, 64


def first_call(case):
    """Forward and backward; the kernels that were compiled, and those that were found, as JSON."""
    from triton import knobs

    compiled, found = [], []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: (found if cache_hit else compiled).append(src.name)
    options = dict(CASES[case])
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=options["dtype"]).requires_grad_() for _ in range(3))
    o = tw.attention(q, k, v, mask=tw.Causal(), backend=options["backend"])
    o.backward(torch.randn_like(o))
    torch.cuda.synchronize()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    print(json.dumps({"compiled": compiled, "found": found}))


@pytest.mark.parametrize("named", [False, True], ids=["this GPU", "its name"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_call_of_another_process_compiles_nothing(case, named, tmp_path, monkeypatch):
    options = dict(CASES[case])
    if options["backend"] == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need compute capability 9.0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q = torch.empty(SHAPE, dtype=options["dtype"], device="meta")
    device = "sm_{}{}".format(*torch.cuda.get_device_capability()) if named else None
    warmed = tw.warm(q, q, q, mask=tw.Causal(), backend=options["backend"], device=device)
    assert all(kernel.seconds for kernel in warmed.kernels)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "0"}
    command = [sys.executable, Path(__file__), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["compiled"] == []
    assert sorted(counted["found"]) == sorted(kernel.name for kernel in warmed.kernels)


if __name__ == "__main__":
    first_call(sys.argv[1])
