"""Run one training in a separate process, so that its time and memory are measured alone.

Prints one JSON object a line: {"loss": ...} for each step, {"time_s": ..., "peak_bytes": ...} at the end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import Tensor

import tilewise as tw

from .. import environment
from ..bench.measure import Resident, pace, sample, spread, synchronize
from ..bench.peers import PEERS
from ..bench.results import OURS
from ..bench.suites import Case
from ..bench.tables import is_ours
from .gpt import GPT, Attend, batches, in_order, library_text, move, read_tokens

SAMPLES = 5
SIZES = ("steps", "context", "batch", "layers", "heads", "width", "vocabulary", "learning_rate", "warm_up_steps")
MATMUL = ("highest", "high")
MOVED = " moved"
"""Behind an attention's name: its training begins with every weight one rounding away."""


@dataclass(frozen=True)
class Settings:
    """A model and its training, all in fp32."""

    steps: int
    context: int
    """Tokens a sequence."""
    batch: int
    layers: int
    heads: int
    width: int
    seed: int = 0
    learning_rate: float = 1e-3
    device: str = "cpu"
    vocabulary: int = 256
    warm_up_steps: int = 10
    """The first that has the whole learning rate."""
    weight_decay: float = 0.01
    clip: float | None = 1.0
    """The most that the norm of all gradients may be."""
    shuffled: bool = True
    """Whether batches are drawn at random from the text, or follow it."""
    tokens: str | None = None
    """A file in llm.c's format; None: the bytes of the standard library."""
    validation: str | None = None
    """Another one, whose loss is measured at the end."""
    matmul: str = "highest"
    """Torch's setting for fp32 products: of the linear layers, and of standard attention."""
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.width % self.heads or self.width // self.heads > 256:
            raise ValueError(
                f"width must be heads times a head size up to 256, got {self.width} for {self.heads} heads"
            )
        if self.matmul not in MATMUL:
            raise ValueError(f"matmul must be one of {', '.join(MATMUL)}, got {self.matmul!r}")

    @staticmethod
    def fitting(device: torch.device) -> "Settings":
        """Return settings that train in about a minute on the device."""
        if device.type == "cuda":
            return Settings(steps=200, context=2048, batch=4, layers=6, heads=6, width=384, device="cuda")
        return Settings(steps=40, context=2048, batch=1, layers=4, heads=4, width=128)

    @staticmethod
    def gpt2(device: torch.device) -> "Settings":
        """Return the settings of GPT-2 124M as llm.c trains it in fp32: 74 steps are once through tiny Shakespeare."""
        return Settings(
            steps=74, context=1024, batch=4, layers=12, heads=12, width=768, learning_rate=3e-4, device=device.type,
            vocabulary=50257, warm_up_steps=1, weight_decay=0.0, clip=None, shuffled=False,
        )  # fmt: skip

    @property
    def case(self) -> Case:
        """Return its attention, for peers."""
        return Case(self.batch, self.heads, self.context, self.width // self.heads, "fp32", causal=True)


def attend_with(name: str, settings: Settings) -> Attend:
    """Return causal attention by "tilewise", by tilewise in a precision ("tilewise bf16x6"), or by another peer."""
    if is_ours(name):
        precision = name.removeprefix(OURS).strip() or None
        options = {"mask": tw.Causal(), "precision": precision, "deterministic": settings.deterministic}
        return lambda qkv: tw.attention_qkvpacked(qkv, **options)
    attend = PEERS[name].prepare(settings.case, torch.device(settings.device))
    return lambda qkv: attend(*qkv.unbind(2))


def text_of(settings: Settings, file: str | None, rows: int | None = None) -> Tensor:
    """Return the tokens of a file, or the bytes of the standard library; at least as many as `rows` or a step need."""
    text = read_tokens(Path(file)) if file else library_text()
    needed = (rows or settings.batch) * settings.context + 1
    if len(text) < needed:
        raise ValueError(f"tokens: a step needs {needed} of them, {file} holds {len(text)}; shorten batch or context")
    if (largest := int(text.max())) >= settings.vocabulary:
        raise ValueError(f"tokens: {file} holds token {largest}, the vocabulary has {settings.vocabulary}")
    return text


class TrainingError(RuntimeError):
    """The process ended early; the message is the last line of its complaint."""


def train_apart(settings: Settings, attention: str, alone: bool = False) -> Iterator[dict[str, float]]:
    """Yield the lines of a separate process as it prints them. `alone`: at the end, time attention alone, too."""
    request = json.dumps({"settings": asdict(settings), "attention": attention, "alone": alone})
    command = [sys.executable, "-m", f"{__package__}.trainer", request]
    with tempfile.TemporaryFile("w+") as complaints:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, env=environment(), text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode:
            complaints.seek(0)
            raise TrainingError((complaints.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1])


def train(settings: Settings, attention: str, alone: bool = False) -> Iterator[dict[str, float]]:
    """Yield what the process prints, line by line."""
    _set_torch(settings)
    name = attention.removesuffix(MOVED)
    with PEERS[name].context():
        attend = attend_with(name, settings)
        for line in train_with(settings, attend, moved=name != attention):
            if alone and "loss" not in line:
                line["attention_s"] = _attention_seconds(settings, attend, torch.device(settings.device))
            yield line


def train_with(settings: Settings, attend: Attend, moved: bool = False) -> Iterator[dict[str, float]]:
    """Train in this process, and yield the same lines. `moved`: begin with every weight one rounding away."""
    device = torch.device(settings.device)
    text = text_of(settings, settings.tokens)
    _step_once(replace(settings, context=32, batch=1), attend, text, device)  # libraries load their own memory
    torch.manual_seed(settings.seed)
    model = _model(settings, attend)
    if moved:
        move(model, settings.seed)
    model.to(device)
    given = {"betas": (0.9, 0.999), "weight_decay": settings.weight_decay, "fused": device.type == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, **given)
    data = _data(settings, text)
    resident = Resident()
    if device.type == "cuda":
        _step_once(settings, attend, text, device)  # kernels compile outside the measured time
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    start = end = time.perf_counter()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warm_up_steps)
        loss = model.loss(next(data).to(device))
        optimizer.zero_grad()
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        synchronize(device)
        begin, end = end, time.perf_counter()
        yield {"loss": float(loss.detach()), "seconds": end - begin}
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else resident.peak()
    found = {"time_s": end - start, "peak_bytes": peak}
    if settings.validation:
        found["validation"] = _validate(settings, model, device)
    yield found


def _set_torch(settings: Settings) -> None:
    torch.set_float32_matmul_precision(settings.matmul)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _data(settings: Settings, text: Tensor) -> Iterator[Tensor]:
    if settings.shuffled:
        return batches(text, settings.batch, settings.context, settings.seed)
    return chain.from_iterable(in_order(t, settings.batch, settings.context) for t in repeat(text))


@torch.no_grad()
def _validate(settings: Settings, model: GPT, device: torch.device) -> float:
    text = text_of(settings, settings.validation, rows=1)
    rows = min(settings.batch, (len(text) - 1) // settings.context)
    losses = [float(model.loss(piece.to(device))) for piece in in_order(text, rows, settings.context)]
    return sum(losses) / len(losses)


def _attention_seconds(settings: Settings, attend: Attend, device: torch.device) -> float:
    """Return the seconds of all layers in a step: one forward and backward of attention alone, times the layers."""
    batch, length, heads, size = settings.case.shape
    qkv = torch.randn(batch, length, 3, heads, size, device=device, requires_grad=True)
    do = torch.randn(batch, length, heads, size, device=device)

    def call() -> object:
        return torch.autograd.grad(attend(qkv), qkv, do)

    paced = pace(call, device)
    return settings.layers * spread([sample(call, paced, device) for _ in range(SAMPLES)])[1]


def _model(settings: Settings, attend: Attend) -> GPT:
    sizes = settings.layers, settings.heads, settings.width, settings.context
    return GPT(*sizes, attend, settings.vocabulary)


def _step_once(settings: Settings, attend: Attend, text: Tensor, device: torch.device) -> None:
    """Run a forward and a backward of a model that is thrown away."""
    with device:  # where its weights are made sooner
        model = _model(settings, attend)
    model.loss(next(batches(text, settings.batch, settings.context, 0)).to(device)).backward()


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    for line in train(Settings(**request["settings"]), request["attention"], request["alone"]):
        print(json.dumps(line), flush=True)
