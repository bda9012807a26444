"""A rank that dies ends the others with a sentence, after the group's time-out."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CODE = textwrap.dedent("""
    import os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import tilewise as tw
    import tilewise.parallel as tp
    rank, folder, plan = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=4))
    q = torch.randn(1, 16, 2, 8)
    tp.attention(q, q, q, sharding=tp.Zigzag(dist.group.WORLD), plan=plan, mask=tw.Causal())
    impatient = tp.Zigzag(dist.new_group([0, 1], timeout=timedelta(seconds=8)))
    tp.attention(q, q, q, sharding=impatient, plan=plan, mask=tw.Causal())
    if rank == 1:
        os._exit(0)
    try:
        tp.attention(q, q, q, sharding=impatient, plan=plan, mask=tw.Causal())
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
""")


@pytest.mark.parametrize("plan", ["ring", "ulysses"])
def test_the_others_say_that_a_rank_does_not_answer(plan, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path), plan], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert "a rank of the group does not answer any more" in said[0]
    assert "run again from the last checkpoint" in said[0]
