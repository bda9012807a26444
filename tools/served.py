"""A version's process, which versions.py starts: for every line of questions, what to time, a line with the seconds of
a call. Versions before 0.2 have the benchmark in the package."""

import json
import sys
from contextlib import ExitStack, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

BENCH = "tilewise.bench" if find_spec("tilewise.bench") else "studies.bench"
accuracy, measure, peers, suites = (
    import_module(f"{BENCH}.{name}") for name in ("accuracy", "measure", "peers", "suites")
)


def main() -> None:
    """Answer until there are no more questions."""
    answers = sys.stdout
    held: Any = None
    timed: Any = None
    with ExitStack() as stack, redirect_stdout(sys.stderr):
        for line in sys.stdin:
            question = json.loads(line)
            try:
                if question != held:
                    stack.close()
                    device, peer = torch.device(question["device"]), peers.PEERS[question["peer"]]
                    case = peer.computes(suites.Case(**question["case"]))
                    x = accuracy.Inputs.random(case, device)
                    call = stack.enter_context(measure.bound(peer, peer.prepare(case, device), x, question["pass"]))
                    timed, held = partial(measure.sample, call, measure.pace(call, device), device), question
                answer = {"seconds": timed()}
            except Exception as error:  # what this version cannot do is listed, and the others go on
                held, answer = None, {"why": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
