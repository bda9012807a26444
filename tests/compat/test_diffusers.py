"""tilewise.compat.diffusers: diffusers' models on tilewise, with the numbers of its backend "native"."""

import sys

import pytest
import torch

import tilewise as tw
from tilewise.compat import diffusers as compat

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: see tests/constraints.txt")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


def entries():
    """What diffusers knows of backends, to compare before and after."""
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    tables = [registry._backends, registry._constraints, registry._supported_arg_names]
    members = list(names), dict(names.__members__), names._member_names_[:], set(vars(names))
    return [*map(set, tables), *members, registry._active_backend]


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def flux():
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


def draw(M=9, N=12, H_k=4):
    shapes = (2, M, 4, 8), (2, N, H_k, 8), (2, N, H_k, 8)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def results(x, backend, **options):
    out = dispatch.dispatch_attention_fn(*x, backend=backend, **options)
    return out, *torch.autograd.grad(out.square().sum(), x)


def test_a_model_gives_the_numbers_of_native(installed):
    model, x = flux(), torch.randn(1, 16, 4)
    options = {"encoder_hidden_states": torch.randn(1, 6, 32), "pooled_projections": torch.randn(1, 32)}
    options |= {"timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}

    def step():
        out = model(x, **options, return_dict=False)[0]
        return out, *torch.autograd.grad(out.square().sum(), tuple(model.parameters()), allow_unused=True)

    expected = step()
    model.set_attention_backend("tilewise")
    with tw.count_calls() as calls:
        found = step()
    model.reset_attention_backend()
    assert calls.ran == {"cpu": 2}
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


MASKS = {
    "nothing": lambda: {},
    "causal": lambda: {"is_causal": True},
    "grouped": lambda: {"enable_gqa": True, "scale": 0.3},
    "bools": lambda: {"attn_mask": torch.rand(2, 1, 9, 12) < 0.7},
    "keys": lambda: {"attn_mask": torch.arange(12) < torch.tensor([[5], [12]])},
    "numbers": lambda: {"attn_mask": torch.randn(1, 4, 9, 12, dtype=torch.float64)},
}


@pytest.mark.parametrize("case", MASKS)
def test_arguments_mean_what_native_means(case, installed):
    options, x = MASKS[case](), draw(H_k=2 if case == "grouped" else 4)
    for got, want in zip(results(x, "tilewise", **options), results(x, "native", **options), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_lse_comes_on_request(installed):
    x = draw()
    out, lse = dispatch.dispatch_attention_fn(*x, attention_kwargs={"return_lse": True}, backend="tilewise")
    o, expected = tw.attention(*x, return_lse=True)
    assert torch.equal(out, o)
    assert torch.equal(lse, expected.transpose(1, 2))


def test_the_context_manager_chooses_it(installed):
    x = draw()
    with dispatch.attention_backend("tilewise"), tw.count_calls() as calls:
        dispatch.dispatch_attention_fn(*x)
    dispatch.dispatch_attention_fn(*x)
    assert calls.total() == 1


def test_what_it_cannot_do_is_refused(installed):
    refused = {"is_causal": True, "attn_mask": torch.ones(9, 12, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"is_causal must come without a mask .* got a mask"):
        dispatch.dispatch_attention_fn(*draw(), backend="tilewise", **refused)
    with pytest.raises(ValueError, match=r"got 9 queries and 4 keys"):
        dispatch.dispatch_attention_fn(*draw(N=4), backend="tilewise", is_causal=True)
    with pytest.raises(ValueError, match=r"context parallelism; call set_attention_backend\('native'\)"):
        dispatch.dispatch_attention_fn(*draw(), backend="tilewise", parallel_config=object())


def test_install_twice_and_uninstall_leave_nothing():
    before = entries()
    compat.install()
    once = entries()
    compat.install()
    assert entries() == once != before
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName("tilewise"))
    compat.uninstall()
    assert entries() == before
    compat.uninstall()
    assert entries() == before
    with pytest.raises(ValueError, match="tilewise"):
        dispatch.AttentionBackendName("tilewise")


def test_without_diffusers_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(ImportError, match=r"install tilewise\[integrations\]"):
        compat.install()
