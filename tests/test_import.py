"""What `import tilewise` and a first call cost and bring along, each in a separate process."""

import json
import textwrap

import preloaded
import pytest

PREAMBLE = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
before = set(sys.modules)
"""


def run(script):
    """What a script prints last, read as JSON."""
    program = PREAMBLE + textwrap.dedent(script)
    done = preloaded.run("-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORT = """
import resource
def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
start = used()
import tilewise
print(json.dumps([used() - start, sorted(set(sys.modules) - before)]))
"""


def test_the_import_adds_little_to_torchs_and_brings_neither_the_compiler_nor_triton():
    pytest.importorskip("resource", reason="the operating system does not count a process's seconds")
    seconds, brought = run(IMPORT)
    assert "tilewise.attention.api" in brought
    assert [name for name in brought if name.startswith(("torch._dynamo", "torch._inductor", "triton", "sympy"))] == []
    assert seconds <= 0.3


CALL = """
import tilewise as tw
q, k, v = (torch.randn(2, 9, 4, 8, requires_grad=True) for _ in range(3))
tw.attention(q, k, v, mask=tw.Causal(), dropout=0.1).sum().backward()
tw.rotary(q, torch.ones(9, 4), torch.zeros(9, 4)).sum().backward()
print(json.dumps([name for name in sys.modules if name.startswith(("tilewise.triton", "tilewise.hopper", "triton"))]))
"""


def test_a_call_on_the_cpu_imports_no_other_back_end():
    assert run(CALL) == []


def test_the_interpreter_still_runs_when_asked_for_and_explain_tells_every_refusal():
    pytest.importorskip("triton", reason="Triton is not installed")
    backend, refusals, error = run("""
    import tilewise as tw
    q = torch.randn(1, 16, 1, 16)
    plan = tw.explain(q, q, q)
    error = (tw.attention(q, q, q, backend="triton") - tw.attention(q, q, q)).abs().max().item()
    print(json.dumps([plan.backend, plan.refusals, error]))
    """)
    assert backend == "cpu"
    assert list(refusals) == ["hopper", "triton", "cpu"]
    assert "sm_90" in refusals["hopper"][0]
    assert "backend='triton'" in refusals["triton"][0]
    assert error < 1e-5


@pytest.mark.parametrize(
    "order",
    [
        "import tilewise as tw; from torch.utils.flop_counter import FlopCounterMode",
        "from torch.utils.flop_counter import FlopCounterMode; import tilewise as tw",
    ],
)
def test_flops_are_counted_whichever_is_imported_first(order):
    counted = run(f"""
    {order}
    counter = FlopCounterMode(display=False)
    q = torch.randn(2, 9, 4, 8, requires_grad=True)
    with counter:
        tw.attention(q, q, q).sum().backward()
    print(json.dumps(counter.get_total_flops()))
    """)
    assert counted == 2 * 4 * 9 * 9 * (2 * 16 + 2 * 40)


def test_a_watch_for_an_import_that_fails_or_never_comes_is_harmless():
    assert run("""
    from importlib.util import find_spec
    from tilewise.call.import_hook import when_imported
    seen = []
    when_imported("no_such_module", seen.append)
    when_imported("colorsys", seen.append)
    assert find_spec("no_such_module") is None
    assert find_spec("colorsys") is not None and seen == []
    import colorsys
    when_imported("colorsys", seen.append)
    print(json.dumps([module is colorsys for module in seen]))
    """) == [True, True]


def test_several_may_wait_for_one_module():
    """As copies of the package under other names do."""
    assert run("""
    from tilewise.call.import_hook import when_imported
    seen = []
    for name in "abc":
        when_imported("colorsys", lambda module, name=name: seen.append(name + module.__name__))
    import colorsys
    print(json.dumps(sorted(seen)))
    """) == ["acolorsys", "bcolorsys", "ccolorsys"]
