"""The fault for which llm.c's FP32 FlashAttention (pull request 781) trained to a higher loss; docs/results/fp32.md.

Its backward adds dQ, key tile by key tile, to memory that it does not zero. The memory is llm.c's `dl_bt4c`, into which
the MLP of the same block has just written its own gradient.
"""

import pytest
import torch
from conformance import test_conformance as conformance
from conformance.cases import Case

import tilewise as tw
from studies.training.comparison import Comparison
from studies.training.gpt import GPT, batches, library_text
from studies.training.trainer import Settings, attend_with

TILE = 16
CASE = Case(
    "llm.c's call", M=40, N=40, mask=lambda draw: tw.Causal(), strides="qkvpacked", loss="o", deterministic=True
)
SMALL = Settings(steps=12, context=64, batch=2, layers=2, heads=2, width=32, learning_rate=3e-3)


class Adding(torch.autograd.Function):
    """Causal attention of qkv (B, T, 3, H, D) that keeps o and L, with gradients by tiles of keys, in fp32."""

    @staticmethod
    def forward(ctx, qkv, memory):
        q, k, v = heads_first(qkv)
        S = scores(q, k)  # (B, H, T, T)
        L = torch.logsumexp(S, -1)
        o = (torch.exp(S - L[..., None]) @ v).transpose(1, 2)
        ctx.save_for_backward(qkv, o, L)
        ctx.memory = memory
        ctx.mark_non_differentiable(L)
        return o, L

    @staticmethod
    def backward(ctx, do, _):
        qkv, o, L = ctx.saved_tensors
        q, k, v = heads_first(qkv)
        delta = (do * o).sum(-1).transpose(1, 2)[..., None]  # (B, H, T, 1)
        do = do.transpose(1, 2)
        dqkv = ctx.memory(qkv)
        dq, dk, dv = heads_first(dqkv)
        for first in range(0, q.shape[2], TILE):
            rows, keys = slice(first, None), slice(first, first + TILE)  # causal: earlier rows see none of these keys
            P = torch.exp(scores(q[:, :, rows], k[:, :, keys]) - L[:, :, rows, None])
            dS = P * (do[:, :, rows] @ v[:, :, keys].mT - delta[:, :, rows]) * q.shape[-1] ** -0.5
            dv[:, :, keys] = P.mT @ do[:, :, rows]
            dk[:, :, keys] = dS.mT @ q[:, :, rows]
            dq[:, :, rows] += dS @ k[:, :, keys]  # to what was there
        return dqkv.clone(), None


def heads_first(qkv):
    """Views of q, k and v: (B, H, T, D)."""
    return (t.transpose(1, 2) for t in qkv.unbind(2))


def scores(q, k):
    """Causal logits; the first query and the first key are the same token's."""
    S = q @ k.mT * q.shape[-1] ** -0.5
    return S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu_(1), -torch.inf)


class Kept:
    """Memory that is zeroed when it is allocated, and then kept: every call finds what the one before left."""

    def __init__(self):
        self.memory = None

    def __call__(self, qkv):
        self.memory = torch.zeros_like(qkv) if self.memory is None else self.memory
        return self.memory


class Shared:
    """llm.c's `dl_bt4c`: the gradient of a block's MLP, and then that of its qkv."""

    def __init__(self):
        self.memory = None

    def fill(self, module, inputs, outputs):
        """As a hook of the MLP's first layer."""
        self.memory = outputs[0].flatten().clone()

    def __call__(self, qkv):
        return self.memory[: qkv.numel()].view(qkv.shape)


def check(backend="cpu"):
    """What every back end passes, for the call that llm.c makes."""
    conformance.test_as_accurate_as_torch_and_repeatable(CASE, backend, lambda *_: None)


def plant(monkeypatch, memory):
    monkeypatch.setattr(tw, "attention_qkvpacked", lambda qkv, **_: Adding.apply(qkv, memory))


@pytest.mark.parametrize("backend", [*conformance.BACKENDS, *(conformance.OF_FP32 if conformance.GPU else ())])
def test_ours_pass(backend):
    check(backend)


def test_it_is_right_where_its_memory_is_zeroed(monkeypatch):
    plant(monkeypatch, torch.zeros_like)
    check()


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (torch.empty_like, "dq is .*nan.* where the truth is"),  # the tests fill it with NaN
        (lambda qkv: torch.full_like(qkv, 1e-4), "dq is off by"),
        (Kept(), "dq differs when run again"),  # so it passed once
    ],
    ids=["fresh", "of another layer", "its own, kept"],
)
def test_the_check_of_every_back_end_rejects_it(monkeypatch, memory, says):
    plant(monkeypatch, memory)
    with pytest.raises(AssertionError, match=says):
        check()


def test_the_comparison_of_trainings_rejects_it_too():
    shared = Shared()
    standard = losses(attend_with("standard", SMALL))
    found = {
        "ours": losses(attend_with("tilewise", SMALL)),
        "zeroed": losses(lambda qkv: Adding.apply(qkv, torch.zeros_like)[0]),
        "planted": losses(lambda qkv: Adding.apply(qkv, shared)[0], shared.fill),
    }
    equal = {
        name: Comparison(SMALL, "cpu", {"standard": standard, "tilewise": other}, {}, {}).equal
        for name, other in found.items()
    }
    assert equal == {"ours": True, "zeroed": True, "planted": False}


def losses(attend, hook=None):
    """Of a small GPT, step by step; the hook is of its MLPs."""
    torch.manual_seed(0)
    model = GPT(SMALL.layers, SMALL.heads, SMALL.width, SMALL.context, attend)
    for block in model.blocks if hook else ():
        block.widen.register_full_backward_hook(hook)
    optimizer = torch.optim.AdamW(model.parameters(), SMALL.learning_rate)
    data, found = batches(library_text(), SMALL.batch, SMALL.context, seed=0), []
    for _ in range(SMALL.steps):
        loss = model.loss(next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
