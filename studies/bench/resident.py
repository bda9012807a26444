"""Run as a separate process: print the growth of its resident memory during one call on the CPU."""

import json
import sys

import torch

from .accuracy import Inputs
from .measure import Resident, bound
from .peers import PEERS
from .suites import Case


def main(request: str) -> int:
    """Return the bytes that a call of `{"case": ..., "peer": ..., "pass": ...}` needs above its inputs."""
    wanted = json.loads(request)
    peer, cpu = PEERS[wanted["peer"]], torch.device("cpu")
    case, small = (peer.computes(Case(**(wanted["case"] | other))) for other in ({}, {"length": 32}))
    with bound(peer, peer.prepare(small, cpu), Inputs.random(small, cpu), wanted["pass"]) as call:
        call()  # threads and libraries load their own memory
    with bound(peer, peer.prepare(case, cpu), Inputs.random(case, cpu), wanted["pass"]) as call:
        resident = Resident()
        call()
        return resident.peak()


if __name__ == "__main__":
    print(main(sys.argv[1]))
