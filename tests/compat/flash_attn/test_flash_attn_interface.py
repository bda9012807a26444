"""tilewise.compat.flash_attn: that package's signatures, and its meaning of every argument, against the reference."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.attention import reference
from tilewise.compat import flash_attn
from tilewise.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, M, N, H, H_K, D = 2, 7, 11, 4, 2, 16

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
CU = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], ["s_aux"]),
    "flash_attn_kvpacked_func": (["q", "kv"], []),
    "flash_attn_qkvpacked_func": (["qkv"], []),
    "flash_attn_varlen_func": (["q", "k", "v", *CU], ["block_table", "s_aux"]),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *CU], []),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], []),
}


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def qkv(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return random(B, M, H, D, grad=grad), random(B, N, H_K, D, grad=grad), random(B, N, H_K, D, grad=grad)


def allowed(left: int | None, right: int | None, rows: int = M, columns: int = N) -> tw.Mask:
    """The window written out: i + N - M - left <= j <= i + N - M + right."""
    i, j = torch.arange(rows, device=DEVICE)[:, None] + columns - rows, torch.arange(columns, device=DEVICE)[None, :]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=DEVICE)
    seen = seen if left is None else seen & (j >= i - left)
    return tw.Dense(seen if right is None else seen & (j <= i + right))


def truth(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    return reference.attention(q.double(), k.double(), v.double(), **options)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    first, last = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*first, *OPTIONS, *last]
    assert all(parameters[argument].default is inspect.Parameter.empty for argument in first)
    assert {argument: parameters[argument].default for argument in OPTIONS} == OPTIONS
    assert all(parameters[argument].default is None for argument in last)


def test_every_function_is_exported():
    assert sorted(flash_attn.__all__) == sorted([*SIGNATURES, "flash_attn_with_kvcache"])


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
CASES = {
    "plain": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"mask": allowed(None, 0)}),
    "window": ({"window_size": (3, 2)}, {"mask": allowed(3, 2)}),
    "window open on the left": ({"window_size": (-1, 2)}, {"mask": allowed(None, 2)}),
    "window open on the right": ({"window_size": (0, -1)}, {"mask": allowed(0, None)}),
    "window of tensors": ({"window_size": (torch.tensor(3), torch.tensor(-1))}, {"mask": allowed(3, None)}),
    "causal closes the right": ({"causal": True, "window_size": (3, 5)}, {"mask": allowed(3, 0)}),
    "causal, right open": ({"causal": True, "window_size": [3, -1]}, {"mask": allowed(3, 0)}),
    "softcap": ({"softcap": 2.0}, {"score": (tw.SoftCap(2.0),)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"score": (tw.Alibi(SLOPES),)}),
    "alibi per batch entry": (
        {"alibi_slopes": torch.stack([SLOPES, SLOPES * 2])},
        {"score": (tw.Alibi(torch.stack([SLOPES, SLOPES * 2])),)},
    ),
    "softcap before alibi": (
        {"softcap": 2.0, "alibi_slopes": SLOPES, "causal": True},
        {"score": (tw.SoftCap(2.0), tw.Alibi(SLOPES)), "mask": allowed(None, 0)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_mean_what_they_say(case):
    given, meant = CASES[case]
    q, k, v = qkv(grad=True)
    expected, expected_lse = truth(q, k, v, **meant)
    assert_near(flash_attn_func(q, k, v, **given), expected)
    out, lse, S_dmask = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    assert_near(out, expected)
    assert_near(lse, expected_lse)
    assert lse.shape == (B, H, M)
    assert lse.dtype == torch.float32
    assert S_dmask.shape == (0,)
    do = random(B, M, H, D)
    grads = torch.autograd.grad(out, (q, k, v), do)
    slow = [t.detach().double() for t in (q, k, v)]
    wanted = reference.gradients(*slow, do.double(), **{"mask": None, "score": (), **meant})
    for got, want in zip(grads, (wanted.q, wanted.k, wanted.v), strict=True):
        assert_near(got, want)


def test_positional_order():
    q, k, v = qkv()
    given = (0.0, 0.2, True, (4, -1), 3.0, SLOPES, True, False)
    expected = truth(
        q, k, v, scale=0.2, mask=allowed(4, 0), score=(tw.SoftCap(3.0), tw.Alibi(SLOPES))
    )[0]  # fmt: skip
    assert_near(flash_attn_func(q, k, v, *given), expected)
    assert_near(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *given), expected)


def test_numpys_integers_are_integers():
    q, k, v = (t.flatten(0, 1) for t in qkv())
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in (M, N))
    plain = flash_attn_varlen_func(q, k, v, cu_q, cu_k, M, N, window_size=(3, 0))
    numpys = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, np.int64(M), np.int32(N), window_size=(np.int64(3), np.array(0))
    )
    assert torch.equal(plain, numpys)


def test_none_is_an_open_side():
    q, k, v = qkv()
    for given, same in (((None, None), (-1, -1)), ((3, None), (3, -1)), ((None, 0), (-1, 0))):
        assert torch.equal(flash_attn_func(q, k, v, window_size=given), flash_attn_func(q, k, v, window_size=same))
    assert torch.equal(
        flash_attn_func(q, k, v, causal=True, window_size=(None, None)), flash_attn_func(q, k, v, causal=True)
    )


def test_who_catches_that_packages_error_catches_ours():
    q, k, v = qkv(grad=True)
    out = flash_attn_varlen_func(q[0], k, v, starts((M,)), starts((N,)), M, N, block_table=starts((0,))[:1, None])
    with pytest.raises(RuntimeError, match="no backward"):
        out.sum().backward()


def test_sinks_enter_the_denominator_and_have_a_gradient():
    q, k, v, s_aux, do = *qkv(grad=True), random(H, grad=True), random(B, M, H, D)
    S = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, 2)) * D**-0.5
    S = S.masked_fill(~allowed(3, 0).dense(M, N), -torch.inf)
    whole = torch.cat([S, s_aux[None, :, None, None].expand(B, H, M, 1)], -1)
    expected = torch.einsum("bhmn,bnhd->bmhd", whole.softmax(-1)[..., :-1], v.repeat_interleave(2, 2))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(3, 0), s_aux=s_aux, return_attn_probs=True)
    assert_near(out, expected)
    assert_near(lse, whole.logsumexp(-1))
    cu = starts((M, M)), starts((N, N))
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    rows = flash_attn_varlen_func(*packed, *cu, M, N, causal=True, window_size=(3, 0), s_aux=s_aux)
    assert_near(rows.view_as(out), expected)
    wanted = torch.autograd.grad(expected, (q, k, v, s_aux), do)
    for got in (out, rows.view_as(out)):
        for a, b in zip(torch.autograd.grad(got, (q, k, v, s_aux), do), wanted, strict=True):
            assert_near(a, b)


def test_rows_without_keys():
    q, k, v = random(1, 5, 2, D), random(1, 2, 2, D), random(1, 2, 2, D)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :3].any()
    assert (lse[:, :, :3] == -torch.inf).all()
    assert_near(out[:, 3:], truth(q, k, v, mask=allowed(None, 0, 5, 2))[0][:, 3:])


def test_packed_arguments_and_their_gradients():
    q, k, v = random(B, M, H, D), random(B, M, H, D), random(B, M, H, D)
    stacked = torch.stack([q, k, v], 2).requires_grad_()
    kv = torch.stack([k, v], 2).requires_grad_()
    separate = [t.clone().requires_grad_() for t in (q, k, v)]
    do = random(B, M, H, D)
    out = flash_attn_func(*separate, causal=True)
    out.backward(do)
    expected = torch.stack([t.grad for t in separate], 2)
    for got, leaf, grad in (
        (flash_attn_qkvpacked_func(stacked, causal=True), stacked, expected),
        (flash_attn_kvpacked_func(q, kv, causal=True), kv, expected[:, :, 1:]),
    ):
        got.backward(do)
        assert torch.equal(got, out)
        assert_near(leaf.grad, grad)


LENGTHS_Q, LENGTHS_K = (3, 0, 7, 1), (5, 2, 4, 6)


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


@pytest.mark.parametrize("tensors", [False, True])
def test_varlen_is_one_call_per_sequence(tensors):
    q, k, v = random(11, H, D), random(17, H_K, D), random(17, H_K, D)
    cu = starts(LENGTHS_Q), starts(LENGTHS_K)
    longest = (torch.tensor(7), torch.tensor(6)) if tensors else (7, 6)
    slopes = torch.rand(4, H, device=DEVICE)
    options = {"causal": True, "window_size": (3, -1), "softcap": 4.0, "return_attn_probs": True}
    out, lse, S_dmask = flash_attn_varlen_func(q, k, v, *cu, *longest, alibi_slopes=slopes, **options)
    assert lse.shape == (H, 11)
    assert S_dmask.shape == (0,)
    packed = flash_attn_varlen_kvpacked_func(
        q, torch.stack([k, v], 1), *cu, *longest, alibi_slopes=slopes, **options
    )  # fmt: skip
    assert torch.equal(packed[0], out)
    assert torch.equal(packed[1], lse)
    for b in range(4):
        rows, columns = slice(*cu[0][b : b + 2].tolist()), slice(*cu[1][b : b + 2].tolist())
        alone = flash_attn_func(
            q[None, rows], k[None, columns], v[None, columns], alibi_slopes=slopes[b], **options
        )  # fmt: skip
        assert_near(out[rows], alone[0][0])
        assert_near(lse[:, rows], alone[1][0])


def test_a_buffer_of_fixed_size_may_be_longer_than_its_sequences():
    q, cu = random(12, H, D), torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    out, lse, _ = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, causal=True, return_attn_probs=True)
    short, short_lse, _ = flash_attn_varlen_func(*(q[:9],) * 3, cu, cu, 5, 5, causal=True, return_attn_probs=True)
    assert torch.equal(out[:9], short)
    assert torch.equal(lse[:, :9], short_lse)
    assert not out[9:].any()


def test_varlen_qkvpacked():
    qkv = random(11, 3, H, D, grad=True)
    cu = starts(LENGTHS_Q)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True)
    q, k, v = qkv.unbind(1)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True)
    assert torch.equal(out, expected)
    do = random(11, H, D)
    got, wanted = (torch.autograd.grad(o, qkv, do)[0] for o in (out, expected))
    assert_near(got, wanted)


def test_the_dropout_pattern_is_exact_under_autocast():
    q, k, v = qkv()
    with torch.autocast(DEVICE, torch.bfloat16):
        out, _, S_dmask = flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
    assert S_dmask.dtype == out.dtype == torch.bfloat16
    rows = S_dmask.float().abs().sum(-1)
    assert (rows - 1.0).abs().max() < 2**-8


def test_dropout_pattern_is_the_one_that_was_used():
    q, k, v = qkv(grad=True)
    slopes = torch.stack([SLOPES, SLOPES * 2])
    out, lse, S_dmask = flash_attn_func(
        q, k, v, 0.4, causal=True, softcap=5.0, alibi_slopes=slopes, return_attn_probs=True
    )  # fmt: skip
    assert S_dmask.shape == (B, H, M, N)
    assert not S_dmask.requires_grad
    S = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, 2)) * D**-0.5
    i, j = torch.arange(M, device=DEVICE)[:, None] + N - M, torch.arange(N, device=DEVICE)
    S = 5.0 * torch.tanh(S / 5.0) - slopes[:, :, None, None] * (i - j).abs()
    P = torch.exp(S - lse[..., None]).masked_fill(~allowed(None, 0).dense(M, N), 0.0)
    assert_near(S_dmask.abs(), P)
    kept = S_dmask > 0
    assert 0.4 < kept.sum() / (P > 0).sum() < 0.8
    dropped = torch.where(kept, P, 0.0) / 0.6
    expected = torch.einsum("bhmn,bnhd->bmhd", dropped, v.repeat_interleave(2, 2))
    assert_near(out, expected)
    do = random(B, M, H, D)
    for got, want in zip(
        *(torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for o in (out, expected)), strict=True
    ):
        assert_near(got, want)


def test_dropout_pattern_of_packed_sequences():
    q, k, v = random(11, H, D), random(17, H_K, D), random(17, H_K, D)
    cu = starts(LENGTHS_Q), starts(LENGTHS_K)
    out, _, S_dmask = flash_attn_varlen_func(q, k, v, *cu, 7, 6, 0.5, return_attn_probs=True)
    assert S_dmask.shape == (4, H, 7, 6)
    for b, (rows, columns) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        assert not S_dmask[b, :, rows:].any()
        assert not S_dmask[b, :, :, columns:].any()
        P = S_dmask[b, :, :rows, :columns]
        assert_near(P.abs().sum(-1), torch.ones(H, rows, device=DEVICE))
        values = v[cu[1][b] : cu[1][b + 1]].repeat_interleave(2, 1)
        assert_near(out[cu[0][b] : cu[0][b + 1]], torch.einsum("hmn,nhd->mhd", P.clamp(min=0) / 0.5, values))


def test_dropout_follows_torchs_generator():
    q, k, v = qkv()
    torch.manual_seed(3)
    first = flash_attn_func(q, k, v, 0.5)
    second = flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(3)
    assert torch.equal(flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_types(dtype):
    if DEVICE == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is for the CPU")
    q, k, v = (t.to(dtype) for t in qkv())
    out, lse, S_dmask = flash_attn_func(q, k, v, 0.1, causal=True, return_attn_probs=True)
    assert out.dtype == S_dmask.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_compiles_without_a_break():
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, window_size=(3, -1), softcap=2.0, alibi_slopes=SLOPES)

    run = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (N, N - 2):
        assert_near(run(q, k[:, :rows], v[:, :rows]), call(q, k[:, :rows], v[:, :rows]))


def test_what_is_not_here_says_so():
    q, k, v = random(3, H, D), random(3, H_K, D), random(3, H_K, D)
    cu = starts((3,))
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(tw.Unsupported, match="goes with no dropout"):
        flash_attn_varlen_func(q, k[None], v[None], cu, cu, 3, 3, dropout_p=0.5, block_table=table)
    with pytest.raises(ValueError, match=r"qkv must have shape \(B, N, 3, H, D\), got \(3, 4, 16\)"):
        flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"kv must have shape .*got \(2, 7, 3, 4, 16\)"):
        flash_attn_kvpacked_func(random(B, M, H, D), random(B, M, 3, H, D))
    with pytest.raises(ValueError, match="SoftCap"):
        flash_attn_func(q[None], k[None], v[None], softcap=-1.0)
    with pytest.raises(ValueError, match="dropout"):
        flash_attn_func(q[None], k[None], v[None], dropout_p=1.0)
