"""Heads whose score matrix is one tile have kernels of their own (triton/single), by the name of their back end."""

import pytest
import torch
import triton

import tilewise as tw
from tilewise.call.backend import BACKWARD, FORWARD, planned
from tilewise.host.launch import Launch

needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")
SIZES = ((3, 17, 17, 4, 4, 32, 32), (5, 32, 20, 4, 2, 16, 40), (2, 9, 31, 2, 2, 64, 32), (1, 1, 1, 1, 1, 16, 16))
"""B, M, N, H, H_k, D, D_v."""


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def shared(s, b, h, i, j, table):
    return s + table[i]


VARIANTS = {
    "plain": lambda B, M, N, H: ((), lambda: {}),
    "causal": lambda B, M, N, H: ((), lambda: {"mask": tw.Causal()}),
    "padding": lambda B, M, N, H: ((), lambda: {"mask": tw.Padding(torch.arange(B, dtype=torch.int32) % (N + 1))}),
    "window and dense": lambda B, M, N, H: (
        (), lambda: {"mask": tw.Window(5, 3) & tw.Dense(torch.arange(M * N).reshape(M, N) % 3 > 0)},
    ),
    "dropout": lambda B, M, N, H: ((), lambda: {"dropout": 0.3, "seed": 7}),
    "sink": lambda B, M, N, H: ((drawn(H),), lambda sink: {"sink": sink}),
    "softcap": lambda B, M, N, H: ((), lambda: {"score": tw.SoftCap(3.0)}),
    "bias": lambda B, M, N, H: ((drawn(H, M, N),), lambda bias: {"score": tw.Bias(bias)}),
    "rows filled with -1e30": lambda B, M, N, H: (
        (drawn(1, M, N).masked_fill(torch.arange(M)[:, None] < 3, -1e30),), lambda bias: {"score": tw.Bias(bias)},
    ),
    "bias of batch entries": lambda B, M, N, H: ((drawn(B, H, M, N),), lambda bias: {"score": tw.Bias(bias)}),
    "bias of all heads": lambda B, M, N, H: ((drawn(1, M, N),), lambda bias: {"score": tw.Bias(bias)}),
    "bias of columns": lambda B, M, N, H: ((drawn(H, 1, N),), lambda bias: {"score": tw.Bias(bias)}),
    "slopes": lambda B, M, N, H: ((drawn(H),), lambda slopes: {"score": tw.Alibi(slopes)}),
    "three scores": lambda B, M, N, H: (
        (drawn(M), drawn(H, M, N)),
        lambda table, bias: {"score": (tw.Score.of(shared, table, align="first"), tw.Bias(bias), tw.SoftCap(4.0))},
    ),
    "all": lambda B, M, N, H: (
        (drawn(H, M, N), drawn(H)),
        lambda bias, sink: {"mask": tw.Causal(), "score": tw.Bias(bias), "sink": sink, "dropout": 0.2, "seed": 3},
    ),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ran."""
    names, run = [], Launch.run
    monkeypatch.setattr(
        Launch, "run", lambda one, stream=None: (names.append(one.kernel.fn.__name__), run(one, stream))
    )
    return names


def results(backend, tensors, options, do, dlse):
    leaves = [t.detach().requires_grad_() for t in tensors]
    o, lse = tw.attention(*leaves[:3], backend=backend, return_lse=True, **options(*leaves[3:]))
    hidden = lse.isinf()  # no gradient comes to a row without keys
    grads = torch.autograd.grad((o, lse), leaves, (do, dlse.masked_fill(hidden, 0.0)))
    return o.detach(), lse.detach(), *grads


OF_HEADS = "bias", "bias of columns", "bias of batch entries"


@needs_interpreter
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_result_is_right(size, variant, launched):
    torch.manual_seed(0)
    B, M, N, H, H_k, D, D_v = size
    learned, options = VARIANTS[variant](B, M, N, H)
    tensors = drawn(B, M, H, D), drawn(B, N, H_k, D), drawn(B, N, H_k, D_v), *learned
    do, dlse = drawn(B, M, H, D_v), drawn(B, H, M)
    true = results("cpu", tensors, options, do, dlse)
    found = results("triton", [t.float() for t in tensors], options, do.float(), dlse.float())
    assert launched.count("attention_forward_single") == 1
    fused = H == H_k or variant not in (*OF_HEADS, "slopes", "three scores", "all")
    of_rows = "rows filled with -1e30", "bias of all heads", "three scores", "all"
    unshifted = M == N or variant not in (*OF_HEADS, *of_rows) or variant == "bias of columns"
    assert launched.count("attention_backward_single") == 1 or not (fused and unshifted)
    for x, t in zip(found, true, strict=True):
        torch.testing.assert_close(
            x.double(), t, rtol=2e-5, atol=2e-5 * max(1.0, float(t.nan_to_num(0, 0, 0).abs().max()))
        )


@needs_interpreter
def test_programs_that_share_a_batch_sum_to_one_gradient(monkeypatch, launched):
    """7 batch entries among 3 programs a head, of which the last has 1."""
    monkeypatch.setattr("tilewise.triton.single.launch.multiprocessors", lambda device: 1)
    torch.manual_seed(0)
    learned, options = VARIANTS["bias"](7, 12, 12, 2)
    tensors = *(drawn(7, 12, 2, 16) for _ in range(3)), *learned
    do, dlse = drawn(7, 12, 2, 16), drawn(7, 2, 12)
    found = results("triton", [t.float() for t in tensors], options, do.float(), dlse.float())
    assert launched == ["attention_forward_single", "attention_backward_single"]
    for x, t in zip(found, results("cpu", tensors, options, do, dlse), strict=True):
        torch.testing.assert_close(x.double(), t, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "backend", "wanted", "one_tile"),
    [
        (49, "triton", False, (True, True)), (49, None, False, (False, True)), (65, "triton", False, (False, False)),
        (49, "triton", True, (True, True)), (49, None, True, (True, True)), (65, None, True, (False, False)),
    ],
)  # fmt: skip
def test_who_gets_them(tokens, backend, wanted, one_tile):
    """Calls of few tokens, whether a bias of each batch entry learns or not."""
    from tilewise.attention.api import with_defaults
    from tilewise.attention.explain import problem_on
    from tilewise.call.check import check_arguments

    q = torch.empty(8, tokens, 4, 32, dtype=torch.bfloat16, device="meta")
    score = {"score": tw.Bias(torch.empty(8, 4, tokens, tokens, device="meta"))} if wanted else {}
    given = with_defaults("attention", {"backend": backend, **score})
    del given["seed"], given["return_lse"]
    x, *rest = check_arguments(q, q, q, **given)
    problem = problem_on(x, *rest, "sm_90")._replace(wanted=(wanted,) * len(x.extra))
    for which, expected in zip((FORWARD, BACKWARD), one_tile, strict=True):
        said = planned(problem, which).describe()
        assert any("one tile of 64x64 a head" in line for line in said) == expected
