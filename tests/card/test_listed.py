"""Masks that carry lists of their tiles, on a GPU: the same bits, forward and backward, and no list in a layer."""

import pytest
import torch

import tilewise as tw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
B, M, N, H = 2, 700, 900, 4
MASKS = {
    "documents": lambda ids: tw.Causal() & tw.Documents(ids[:, N - M :], ids),
    "dense by head": lambda ids: tw.Dense(torch.rand(B, H, M, N, device="cuda") < 0.02),
    "bools": lambda ids: tw.Padding(torch.rand(B, N, device="cuda") < 0.5) & tw.Window(300, 5),
}
KINDS = {
    "hopper bf16": ("hopper", torch.bfloat16, 64), "hopper bf16 D128": ("hopper", torch.bfloat16, 128),
    "hopper fp32": ("hopper", torch.float32, 64), "triton bf16": ("triton", torch.bfloat16, 64),
    "triton fp32": ("triton", torch.float32, 128),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_results_are_the_same_bit_by_bit(name, kind, monkeypatch):
    from tilewise.host.launch import Launch

    backend, dtype, D = KINDS[kind]
    ids = (torch.arange(N, device="cuda") // 250).expand(B, -1)
    x = [torch.randn(B, length, H, D, dtype=dtype, device="cuda", requires_grad=True) for length in (M, N, N)]
    mask = MASKS[name](ids)
    if reasons := tw.explain(*x, mask=mask, backend=backend).refusals[backend]:
        pytest.skip("; ".join(reasons))

    def results(mask):
        o, lse = tw.attention(*x, mask=mask, backend=backend, return_lse=True)
        return o, lse, *torch.autograd.grad(o.float().sum() + lse.exp().sum(), x)

    wanted, names, run = results(mask), [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, *at: names.append(self.kernel.fn.__name__) or run(self, *at))
    listed = tw.listed(mask, *x, backend=backend)
    assert 0 < names.count("attention_list_tiles") == len(names) <= (2 if backend == "hopper" else 3)
    names.clear()
    for _ in range(2):
        found = results(listed)
        same = [backend == "triton" or n != 2 for n in range(5)]  # Hopper adds dQ up in any order
        assert all(torch.equal(a, b) for a, b, exact in zip(found, wanted, same, strict=True) if exact)
        torch.testing.assert_close(found[2], wanted[2], atol=1e-2, rtol=2e-2)
    assert "attention_list_tiles" not in names
