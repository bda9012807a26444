"""Models on a GPU: transformers' families in bf16, and what a training step of large layers and of nanoGPT costs."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from compat.test_sdpa_clients import Block  # noqa: E402
from compat.transformers.models import CAUSAL, OTHERS, forward, inputs, make  # noqa: E402

import tilewise as tw  # noqa: E402
from tilewise.compat import sdpa  # noqa: E402
from tilewise.compat.transformers import install, uninstall  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),  # transformers sets it
]
N = 8192
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""gpt-oss-20b's layers, with as many experts as a token asks, so that the mixture has its work and not its memory."""
SHAPES = {
    "llama-8b": (lambda: transformers.LlamaConfig(**LLAMA, num_hidden_layers=1, vocab_size=256), ("sdpa",)),
    "gpt-oss-20b": (lambda: transformers.GptOssConfig(**GPT_OSS, num_hidden_layers=2, vocab_size=256), ()),
}
"""Configurations, and which of PyTorch's own kernels transformers takes for them beside flex."""


@pytest.fixture(autouse=True)
def installed():
    transformers.logging.set_verbosity_error()
    install()
    yield
    uninstall()


def on_gpu(given):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def halved(given):
    return {
        name: value.bfloat16() if name in ("pixel_values", "input_features") else value for name, value in given.items()
    }


def errors(found, exact):
    """The largest error of each result, relative to its largest entry; one that is 0 but for rounding (the gradient of
    a bias of K) is compared with the others."""
    least = 1e-2 * max(b.abs().max() for b in exact)
    return [((a.float() - b).abs().max() / max(least, b.abs().max())).item() for a, b in zip(found, exact, strict=True)]


def number(version):
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.parametrize("form", ["right", "left", "packed"])
@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_bf16_is_as_accurate_as_eager(name, form):
    """The largest error of logits and gradients against fp32 eager attention: at most twice that of bf16 eager's."""
    if form == "packed" and name not in CAUSAL:
        pytest.skip("it has no packed rows")
    given, model = on_gpu(inputs(name, form)), make(name).cuda()
    exact = forward(model, given)
    model, given = model.bfloat16(), halved(given)
    eager = errors(forward(model, given), exact)
    model.set_attn_implementation("tilewise")
    with tw.count_calls() as calls:
        ours = errors(forward(model, given), exact)
    if name == "t5" and number(transformers.__version__) < (5, 20):
        pytest.skip("before transformers 5.20 it has attention of its own")
    assert calls.ran.total() > 0
    assert calls.ran.keys() <= {"hopper", "triton"}
    assert ours[0] <= 2 * eager[0]
    assert max(ours) <= 2 * max(eager)


def medians(calls: dict[str, tuple[Callable, Callable[[], None]]], rounds: int = 7) -> dict[str, float]:
    """Milliseconds of each call in its context, round by round, so that all see the same clocks."""
    found = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, (context, call) in calls.items():
            with context():
                call()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(3):
                    call()
                end.record()
                torch.cuda.synchronize()
            if turn:  # the first round compiles
                found[name].append(begin.elapsed_time(end) / 3)
    return {name: sorted(times)[rounds // 2] for name, times in found.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_cost_of_a_training_step_of_large_layers(name, monkeypatch):
    """Printed: a step of 8k tokens, padded on the left. It is no slower than sdpa's and flex's, and a mask costs no
    tensor of queries times keys."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    configure, others = SHAPES[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(configure(), dtype=torch.bfloat16).train()
        ids, real = torch.randint(256, (1, N)), torch.ones(1, N, dtype=torch.int64)
        real[:, :100] = 0

    def step(kind, mask=real):
        model.set_attn_implementation(kind)
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().square().mean().backward()

    def peak(mask):
        torch.cuda.reset_peak_memory_stats()
        step("tilewise", mask)
        return torch.cuda.max_memory_allocated()

    kinds = ("tilewise", *others, "flex_attention")
    times = medians({kind: (nullcontext, lambda kind=kind: step(kind)) for kind in kinds})
    masked, plain = peak(real), peak(None)
    print(
        f"{name}: {', '.join(f'{kind} {t:.2f} ms' for kind, t in times.items())}; a mask takes {masked - plain} bytes"
    )
    assert times["tilewise"] <= 1.01 * min(times.values())
    assert masked - plain < N * N // 8


def test_cost_of_a_training_step_of_nanogpt(monkeypatch):
    """Printed: tokens a second of nanoGPT's 124M shape, 12 blocks of 12 heads of 64, unchanged, before and after."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = torch.nn.Sequential(*[Block(768, 12) for _ in range(12)]).bfloat16()
        x = torch.randn(12, 1024, 768, dtype=torch.bfloat16)

    def step():
        model.zero_grad()
        model(x).float().square().mean().backward()

    with tw.count_calls() as calls, sdpa.use():
        step()
    times = medians({"before": (nullcontext, step), "after": (sdpa.use, step)})
    rates = {name: 12 * 1024 / t for name, t in times.items()}
    print(f"nanoGPT: {', '.join(f'{name} {rate:.1f} tokens/ms' for name, rate in rates.items())}; {calls.ran}")
    assert calls.ran == {"hopper": 12} or torch.cuda.get_device_capability() != (9, 0)
    assert rates["after"] >= rates["before"]
