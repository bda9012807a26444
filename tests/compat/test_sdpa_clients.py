"""Models of other packages, as they are, on tilewise.compat.sdpa: values and gradients as on PyTorch's kernels."""

import os
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional

import tilewise as tw
from tilewise.compat import sdpa

ON_CPU = {"devices": ("cpu",), "always": True}
FAST_PATH = "the C++ fast path of nn.MultiheadAttention"


def both(model, *x, **options):
    """Run a model on PyTorch's kernels and on tilewise; check output and gradients, and return the counts."""
    results = []
    calls = tw.Calls()
    for ours in (False, True):
        torch.manual_seed(7)
        x = [t.detach().requires_grad_() if t.is_floating_point() else t for t in x]
        with tw.count_calls() as counted, sdpa.use(**ON_CPU if ours else {"devices": ("cuda",)}):
            out = model(*x, **options)
            out = out[0] if isinstance(out, tuple) else out
            if out.requires_grad:
                wanted = [p for p in (*x, *model.parameters()) if p.requires_grad]
                torch.manual_seed(8)
                found = torch.autograd.grad(out, wanted, torch.randn(out.shape), allow_unused=True)
                results.append([out, *(g for g in found if g is not None)])
            else:
                results.append([out])
        calls = counted
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    return calls


class Block(nn.Module):
    """A block as nanoGPT has it."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        parts = self.qkv(self.norms[0](x)).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.norms[1](x))


def test_nanogpt():
    assert both(nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 17, 32)).ran == {"cpu": 3}


def test_nanogpt_compiled():
    torch._dynamo.reset()
    with sdpa.use(**ON_CPU), tw.count_calls() as calls:
        model, x = Block(), torch.randn(2, 17, 32)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, model(x))
    assert calls.ran == {"cpu": 1}


PADDED = torch.arange(9) >= torch.tensor([9, 5])[:, None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_padding_mask": PADDED},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(9), "is_causal": True},
        {"attn_mask": torch.randn(8, 9, 9)},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).triu(1), "key_padding_mask": PADDED},
    ],
)
def test_multihead_attention(options):
    x = torch.randn(2, 9, 32)
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    assert both(Self(model, need_weights=False, **options), x).ran == {"cpu": 1}
    assert both(Self(model, need_weights=True, **options), x).total() == 0  # PyTorch multiplies there by itself


class Self(nn.Module):
    """Self-attention with options."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x):
        return self.model(x, x, x, **self.options)


def test_transformer():
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    mask = model.generate_square_subsequent_mask(7)
    options = {"tgt_mask": mask, "tgt_is_causal": True, "src_key_padding_mask": PADDED}
    calls = both(model, torch.randn(2, 9, 32), torch.randn(2, 7, 32), **options)
    assert calls.ran == {"cpu": 6}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padding", [None, PADDED])
def test_an_encoder_in_evaluation_takes_its_fast_path(padding):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 9, 32)
    for mode in (torch.no_grad, torch.inference_mode):
        expected = model(x, src_key_padding_mask=padding)
        with mode():
            with sdpa.use(**ON_CPU), tw.count_calls() as calls:
                found = model(x, src_key_padding_mask=padding)
            assert calls.fell_back == {FAST_PATH: 3}
            assert not calls.ran
            seen = slice(None) if padding is None else ~padding
            torch.testing.assert_close(found[seen], expected[seen], atol=1e-5, rtol=1e-5)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa.use(**ON_CPU), tw.count_calls() as calls:
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert calls.ran == {"cpu": 3}


@pytest.fixture(scope="module")
def timm():
    """Import timm, from TILEWISE_TIMM if that names its folder. Without a GPU torchvision's operators do not load, and
    its Python part needs only their names."""
    if folder := os.environ.get("TILEWISE_TIMM"):
        sys.path.append(folder)
    if find_spec("timm") is None or find_spec("torchvision") is None:
        pytest.skip("timm is not installed: pip install 'tilewise[integrations]'")
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm

    yield timm
    del library
    if folder:
        sys.path.remove(folder)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_small_patch14_dinov2"])
def test_timm(timm, name):
    model = timm.create_model(name, img_size=56, depth=2, num_classes=5)
    assert both(model, torch.randn(1, 3, 56, 56)).ran == {"cpu": 2}


def test_diffusers():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: see tests/constraints.txt")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    x, words = torch.randn(1, 16, 4), torch.randn(1, 6, 32)
    options = {"pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0])}
    options |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3), "return_dict": False}
    assert both(model, x, words, **options).ran == {"cpu": 2}
