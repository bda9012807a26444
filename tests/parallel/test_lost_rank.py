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
PLANS = ("ring", "ulysses")
CODE = textwrap.dedent("""
    import os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import tilewise as tw
    import tilewise.parallel as tp
    from tests.parallel import forked

    def main(number):
        plan, rank = sys.argv[2 + number // 2], number % 2
        store = dist.FileStore(sys.argv[1] + "/" + plan, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=4))
        q = torch.randn(1, 16, 2, 8)
        tp.attention(q, q, q, sharding=tp.Zigzag(dist.group.WORLD), plan=plan, mask=tw.Causal())
        impatient = tp.Zigzag(dist.new_group([0, 1], timeout=timedelta(seconds=8)))
        tp.attention(q, q, q, sharding=impatient, plan=plan, mask=tw.Causal())
        if rank == 1:
            store.wait(["received"])  # or its end would reset the connection while the other one still reads
        else:
            store.set("received", "")
            try:
                tp.attention(q, q, q, sharding=impatient, plan=plan, mask=tw.Causal())
            except RuntimeError as error:
                print(plan, error, flush=True)

    forked.run(2 * len(sys.argv[2:]), main)
""")


def test_the_others_say_that_a_rank_does_not_answer(tmp_path):
    """The second rank of each plan leaves before the last call."""
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path), *PLANS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    for plan in PLANS:
        (said,) = [line for line in done.stdout.splitlines() if line.startswith(plan)]
        assert "a rank of the group does not answer any more" in said
        assert "run again from the last checkpoint" in said
