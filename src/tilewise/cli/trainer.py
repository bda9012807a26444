"""One training in a process of its own, so that its time and its memory are its own.

Prints one JSON object a line: {"loss": ...} for each step, {"time_s": ..., "peak_bytes": ...} at the end.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

import tilewise as tw

from ..bench.measure import Resident, synchronize
from ..bench.peers import standard_attention
from .gpt import GPT, Attend, batches, library_text

ATTENTION: dict[str, Attend] = {
    "standard": lambda q, k, v: standard_attention(q, k, v, causal=True),
    "tilewise": lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal()),
}
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Settings:
    """A model and its training, all in fp32."""

    steps: int
    context: int
    """Bytes a sequence."""
    batch: int
    layers: int
    heads: int
    width: int
    seed: int = 0
    learning_rate: float = 1e-3
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("seed", "device") and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.width % self.heads or self.width // self.heads > 256:
            raise ValueError(
                f"width must be heads times a head size up to 256, got {self.width} for {self.heads} heads"
            )

    @staticmethod
    def fitting(device: torch.device) -> "Settings":
        """What trains in about a minute there."""
        if device.type == "cuda":
            return Settings(steps=200, context=2048, batch=4, layers=6, heads=6, width=384, device="cuda")
        return Settings(steps=100, context=2048, batch=1, layers=4, heads=4, width=128)


def train(settings: Settings, attention: str) -> Iterator[dict[str, float]]:
    """What the process prints, line by line."""
    device = torch.device(settings.device)
    text = library_text()
    _step_once(replace(settings, context=32, batch=1), attention, text, device)  # libraries load their own memory
    torch.manual_seed(settings.seed)
    model = _model(settings, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    data = batches(text, settings.batch, settings.context, settings.seed)
    resident = Resident()
    if device.type == "cuda":
        _step_once(settings, attention, text, device)  # kernels compile outside the measured time
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    start = time.perf_counter()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        loss = model.loss(next(data).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield {"loss": float(loss.detach())}
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else resident.peak()
    yield {"time_s": seconds, "peak_bytes": peak}


def _model(settings: Settings, attention: str) -> GPT:
    return GPT(settings.layers, settings.heads, settings.width, settings.context, ATTENTION[attention])


def _step_once(settings: Settings, attention: str, text: torch.Tensor, device: torch.device) -> None:
    """A forward and a backward of a model that is thrown away."""
    model = _model(settings, attention).to(device)
    model.loss(next(batches(text, settings.batch, settings.context, 0)).to(device)).backward()


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    for line in train(Settings(**request["settings"]), request["attention"]):
        print(json.dumps(line), flush=True)
