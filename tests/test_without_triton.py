"""Without Triton everything works on the CPU."""

import textwrap

import preloaded

PREAMBLE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("triton is blocked", name="triton")

sys.meta_path.insert(0, Blocked())
import torch
import tilewise as tw

q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 6)
"""


def run(script):
    program = PREAMBLE + textwrap.dedent(script)
    done = preloaded.run("-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_and_gradients():
    assert "right" in run("""
        from tilewise import reference
        x = [t.requires_grad_() for t in (q, k, v)]
        o, lse = tw.attention(*x, mask=tw.Causal(), score=tw.SoftCap(2.0), dropout=0.1, seed=3, return_lse=True)
        grads = torch.autograd.grad((o, lse), x, (torch.ones_like(o), torch.ones_like(lse)))
        wide = [t.detach().double() for t in x]
        expected, _ = reference.attention(*wide, mask=tw.Causal(), score=(tw.SoftCap(2.0),), dropout=0.1, seed=3)
        torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
        assert all(g.isfinite().all() for g in grads)
        assert "triton" not in sys.modules
        print("right")
    """)


def test_explain_says_that_it_is_missing():
    told = run("print(tw.explain(q, k, v))")
    assert "cpu       runs this" in told
    assert "triton is blocked" in told


def test_forcing_it_says_what_to_install():
    assert "pip install 'tilewise[triton]'" in run("""
        try:
            tw.attention(q, k, v, backend="triton")
        except tw.Unsupported as error:
            print(error)
    """)


def test_the_experiment_runs_on_the_cpu_and_says_what_its_kernel_needs():
    told = run("""
        from studies.accumulation import attention
        x = [t.half() for t in (q, k, v)]
        assert attention(*x, accumulate="fp16").isfinite().all()
        try:
            attention(*x, backend="triton")
        except tw.Unsupported as error:
            print(error)
    """)
    assert "pip install 'tilewise[triton]'" in told
