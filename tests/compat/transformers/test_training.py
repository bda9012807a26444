"""What trainings do besides a forward: checkpoints, dropout, autocast, adapters, the Trainer, other processes."""

from functools import partial

import pytest
import torch
from compat.transformers.models import difference, forward, inputs, make, spawned, transformers
from torch import Tensor

from tilewise.compat.transformers import layer, view

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
SOME = ("llama", "gpt_oss", "gemma2")


def both(model, run):
    """What a function gives with eager attention and with tilewise."""
    wanted = run()
    model.set_attn_implementation("tilewise")
    return run(), wanted


@pytest.mark.parametrize("name", SOME)
def test_gradient_checkpointing(name):
    model = make(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    given = inputs(name, "left") | {"use_cache": False}
    assert difference(*both(model, lambda: forward(model, given))) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_repeats_under_checkpointing(reentrant):
    model = make("llama", attention_dropout=0.3).train()
    model.set_attn_implementation("tilewise")
    given = inputs("llama", "left") | {"use_cache": False}
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        results.append(forward(model, given))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(4)
    assert difference(forward(model, given)[:1], results[0][:1]) > 1e-3


@pytest.mark.parametrize("name", SOME)
def test_bf16_is_as_accurate_as_eager(name):
    exact = forward(make(name), inputs(name, "left"))[0]
    model = make(name).bfloat16()
    ours, eager = both(model, lambda: forward(model, inputs(name, "left")))
    errors = [(x[0].float() - exact).abs().max().item() for x in (ours, eager)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("name", SOME)
def test_autocast(name):
    model = make(name)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(model, inputs(name, "left"))

    ours, eager = both(model, run)
    assert difference(ours, eager) < 2e-2


def test_sinks_and_biases_get_gradients():
    for name, learned in (("gpt_oss", "sinks"), ("t5", "relative_attention_bias")):
        model = make(name)
        model.set_attn_implementation("tilewise")
        forward(model, inputs(name))
        grads = [p.grad for field, p in model.named_parameters() if learned in field]
        assert grads, name
        assert all(grad.abs().max() > 0 for grad in grads), name


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["LoRA", "prefix tuning"])
def test_adapters_of_peft(kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = {
        "LoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    }[kind]()
    base = make("llama")
    model = peft.get_peft_model(base, config).eval()
    given = inputs("llama", "left")
    wanted = forward(model, given)
    base.set_attn_implementation("tilewise")
    assert difference(forward(model, given), wanted) < 1e-5


def test_flattened_documents_by_cu_seq_lens():
    """What DataCollatorWithFlattening gives: one row, position ids, and where documents start."""
    model, lengths = make("gemma3"), (5, 9, 3)
    ids = torch.randint(2, 90, (1, sum(lengths)))
    at = torch.cat([torch.arange(length) for length in lengths])[None]
    cu = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    given = {"input_ids": ids, "position_ids": at, "use_cache": False}
    wanted = forward(model, given)
    model.set_attn_implementation("tilewise")
    for more in ({}, packed, packed | {"max_length_q": None, "max_length_k": None}):
        assert difference(forward(model, given | more), wanted) < 1e-5
    with pytest.raises(RuntimeError, match="leave attention_mask out"):
        forward(model, given | packed | {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor(0), 0)})


class Texts(torch.utils.data.Dataset):
    """Random tokens; the labels are the tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(2, 90, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": (torch.arange(12) < 12 - index).long(), "labels": ids}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200)
def test_the_trainer_with_workers(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    losses = []
    for attention in ("eager", "tilewise"):
        model = make("llama").train()
        model.set_attn_implementation(attention)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=4, dataloader_num_workers=1, learning_rate=1e-2,
            use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Texts())
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.timeout(1200)
def test_a_spawned_process_installs_it_itself():
    model, given = make("llama"), inputs("llama", "left")
    model.set_attn_implementation("tilewise")
    with torch.no_grad():
        wanted = model(**given).logits
    process = torch.multiprocessing.get_context("spawn").Process(target=spawned, args=(model, given, wanted))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "form"), [("llama", "left"), ("gemma3", "packed"), ("gpt_oss", "left")])
def test_compile_in_one_graph(name, form):
    model, given = make(name), inputs(name, form) | {"use_cache": False}
    wanted = forward(model, given)
    model.set_attn_implementation("tilewise")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        real = given.get("attention_mask", torch.ones(2, 17))
        model.zero_grad()
        seen = compiled(**given).logits * real[..., None]
        (seen * torch.linspace(-1, 1, seen.numel()).reshape(seen.shape)).sum().backward()
        got = [seen.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        assert difference(got, wanted) < 1e-5
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_all_layers_share_the_lists_of_a_mask(reentrant, monkeypatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("runs in Triton's interpreter")
    from tilewise.host.launch import Launch

    names, run = [], Launch.run
    monkeypatch.setattr("tilewise.triton.backend.single.fits", lambda *_: False)  # which need no lists
    monkeypatch.setattr(Launch, "run", lambda self, *at: names.append(self.kernel.fn.__name__) or run(self, *at))
    monkeypatch.setattr(layer, "attention", partial(layer.attention, backend="triton"))
    monkeypatch.setattr(view, "listed", partial(view.listed, backend="triton"))
    model = make("llama").train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    given = inputs("llama", "packed")
    assert difference(*both(model, lambda: forward(model, given))) < 1e-5
    assert names.count("attention_forward") == (2 if reentrant is None else 4)
    assert 0 < names.count("attention_list_tiles") <= 3
