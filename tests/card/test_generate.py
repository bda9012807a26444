"""generate() of transformers on a GPU, with a static cache whose steps it compiles: tokens, and tokens a second."""

import time

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tilewise as tw  # noqa: E402
from tilewise.compat.transformers import install, uninstall  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch.compile's, of TF32 and online softmax
]
LAYERS = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
NEW = 64


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    transformers.logging.set_verbosity_error()
    install()
    yield
    torch._dynamo.reset()
    uninstall()


def make(dtype, **config):
    torch.manual_seed(0)
    with torch.device("cuda"):
        shape = transformers.LlamaConfig(vocab_size=4096, max_position_embeddings=8192, **config)
        return transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()


def generate(model, kind, ids, real, new=NEW, **cache):
    model.set_attn_implementation(kind)
    return model.generate(
        ids, attention_mask=real, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
        **cache or {"cache_implementation": "static"},
    )[:, ids.shape[1] :]  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_steps_give_the_same_tokens(padded):
    """In fp32, so that one more rounding cannot choose another token."""
    model = make(torch.float32, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
                 num_key_value_heads=2)  # fmt: skip
    ids = torch.randint(1, 4096, (3, 130), device="cuda")
    real = torch.ones_like(ids)
    real[0, : 40 * padded] = 0
    wanted = generate(model, "sdpa", ids, real, 24)
    torch._dynamo.reset()
    with tw.count_calls() as calls:
        found = generate(model, "tilewise", ids, real, 24)
    assert torch.equal(found, wanted)
    assert calls.ran.total() > 0


@pytest.mark.parametrize("batch", [1, 32])
def test_cost_of_generating_on_a_static_cache(batch):
    """Printed: tokens a second of four layers of an 8B Llama behind 1k tokens. They are as many as with sdpa.

    The cache stays where it is: at another address, transformers' compiled step records its CUDA graphs again.
    """
    model = make(torch.bfloat16, num_hidden_layers=4, **LAYERS)
    ids = torch.randint(1, 4096, (batch, 1024), device="cuda")
    real, rates = torch.ones_like(ids), {}
    for kind in ("sdpa", "tilewise"):
        torch._dynamo.reset()
        times, cache = [], transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + NEW)
        for _ in range(8):
            cache.reset()
            torch.cuda.synchronize()
            start = time.perf_counter()
            generate(model, kind, ids, real, past_key_values=cache)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        rates[kind] = batch * NEW / min(times[2:])  # the first two compile and capture
    print(f"batch {batch}: {', '.join(f'{kind} {rate:.0f} tokens/s' for kind, rate in rates.items())}")
    assert rates["tilewise"] >= rates["sdpa"]
