"""Ablation: what is each technique of the forward worth? Importing this adds the suite and its peers to bench's."""

import torch

from tilewise.call.problem import target_of

from ..bench.peers import CHANGED, PEERS, Peer
from ..bench.suites import FORWARD, SUITES, Case, Suite
from . import changes
from .changes import CHANGES, Change


def _cases() -> tuple[Case, ...]:
    return tuple(
        Case(16384 // length, 2048 // head_size, length, head_size, "bf16", causal)
        for head_size in (64, 128, 256)
        for causal, length in ((False, 4096), (True, 4096), (True, 1024))
    )


def _changed(name: str, change: Change) -> Peer:
    """Make a peer of tilewise's forward with one thing changed; it has no backward."""

    def why_not(case: Case, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs a GPU, this is a {device.type}"
        if case.dropout:
            return "is measured without dropout"
        return changes.why_not(change, case.shape, case.type, case.causal, target_of(device))

    return Peer(name, lambda case, device: changes.attention(change, case.causal), why_not)


SUITE = Suite(
    "ablation", "what each technique of the forward is worth", _cases(), (FORWARD,),
    ("tilewise", "tilewise triton", *CHANGES), 5, 8192, (4096,), host=False,
)  # fmt: skip
SUITES[SUITE.name] = SUITE
PEERS.update({name: _changed(name, change) for name, change in CHANGES.items()})
CHANGED.update({name: change.peer for name, change in CHANGES.items()})
