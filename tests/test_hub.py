"""What `make hub` writes: `kernels` loads it beside the installed package, and every copy computes the same."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from hub.write import metadata

ROOT = Path(__file__).parents[1]
kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed: see tests/constraints.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository, as `make hub` writes it."""
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, ROOT / "hub" / "write.py", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def copies(folder):
    """Two under different names: a path of one variant is loaded whatever PyTorch is built for."""
    return [kernels.get_local_kernel(folder / "build" / f"torch-{name}", backend="cpu") for name in ("cpu", "cuda")]


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_each_build_of_pytorch_finds_its_variant(folder, backend, monkeypatch):
    for name, version in {"cuda": "13.0", "hip": "7.0"}.items():
        monkeypatch.setattr(torch.version, name, version if {"hip": "rocm"}.get(name, name) == backend else None)
    found = kernels.get_local_kernel(folder)
    assert re.fullmatch(rf"_tilewise_{backend}_[0-9a-f]{{8}}", found.__name__)


def test_a_copy_is_the_package_without_its_commands(folder, copies):
    assert {"flash_attn_func", "flash_attn_varlen_func"} <= set(dir(copies[0]))
    assert all(hasattr(copies[0], name) for name in tilewise.__all__)
    for variant in (folder / "build").iterdir():
        assert (variant / "hopper" / "parts" / "channel.py").exists()
        assert not (variant / "cli").exists()


def test_another_text_is_another_name(folder, tmp_path):
    variant = shutil.copytree(folder / "build" / "torch-cpu", tmp_path / "changed")
    name = json.loads((variant / "metadata.json").read_text())["id"]
    assert metadata(variant, "cpu")["id"] == name
    with (variant / "api.py").open("a") as file:
        file.write("# more\n")
    assert metadata(variant, "cpu")["id"] != name


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_copies_compute_what_the_installed_package_computes(copies, backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    x = [torch.randn(2, 37, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    bias = torch.randn(37, 37, device=device, requires_grad=True)

    def results(tw):
        torch.manual_seed(1)
        mask, score = tw.Window(9, 3), (tw.SoftCap(5.0), tw.Bias(bias))
        o, lse = tw.attention(*x, mask=mask, score=score, dropout=0.1, return_lse=True, backend=backend)
        return o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), [*x, bias])

    wanted = results(tilewise)
    for copy in copies:
        assert all(map(torch.equal, results(copy), wanted)), copy.__name__


def test_each_copy_compiles_into_one_graph_with_its_own_operators(copies):
    x = [torch.randn(2, 9, 4, 8, requires_grad=True) for _ in range(3)]
    cos, sin = torch.randn(9, 4), torch.randn(9, 4)
    outcomes = []
    for tw in (tilewise, *copies):
        graphs = []

        def keep(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        def layer(q, k, v, tw=tw):
            q, k = tw.rotary_qk(q, k, cos, sin)
            return tw.attention(q, k, v, mask=tw.Causal())

        torch._dynamo.reset()
        torch.compile(layer, fullgraph=True, backend=keep)(*x)
        called = {str(node.target).partition(".")[0] for node in graphs[0].graph.nodes if node.op == "call_function"}
        assert {name for name in called if "tilewise" in name} == {tw.__name__}
        o = torch.compile(layer, fullgraph=True)(*x)
        outcomes.append((o, *torch.autograd.grad(o.square().sum(), x)))
    torch._dynamo.reset()
    for outcome in outcomes[1:]:
        assert all(map(torch.equal, outcome, outcomes[0]))


def test_flops_of_every_copy_are_counted(copies):
    q = torch.randn(2, 9, 4, 8)
    counted = []
    for tw in (tilewise, *copies):
        with FlopCounterMode(display=False) as counter:
            tw.attention(q, q, q)
        counted.append(counter.get_total_flops())
    assert counted == [2 * 4 * 9 * 9 * 2 * 16] * 3


def test_a_value_of_another_copy_is_refused(copies):
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(TypeError, match="mask must be a Mask"):
        copies[0].attention(q, q, q, mask=tilewise.Causal())


def test_a_copy_explains_and_warms_and_copies_share_what_is_compiled(copies, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q = torch.empty(1, 64, 2, 16, dtype=torch.float16, device="meta")
    assert copies[0].explain(q, q, q, device="sm_80").backend == "triton"
    (compiled,) = copies[0].warm(q, q, q, device="sm_80", backward=False).kernels
    (found,) = tilewise.warm(q, q, q, device="sm_80", backward=False).kernels
    assert compiled.seconds > 0.0
    assert found == (compiled.name, compiled.hash, True, None)


def test_the_repository_s_own_page_runs(folder, monkeypatch):
    """`kernels` takes the folder for a repository of the Hub."""
    monkeypatch.setenv("LOCAL_KERNELS", f"OWNER/tilewise={folder}")
    (code,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "hub/README.md", "exec"), names)
    assert names["tw"].__name__.startswith("_tilewise_")
    assert names["q"].grad.isfinite().all()


MODELS = """
import json, tempfile
from transformers.utils import import_utils
if not import_utils.is_kernels_available():  # another version than transformers asks for; it loads kernels alike
    import_utils.is_kernels_available = lambda *_: True

import kernels, transformers
from compat.transformers.models import difference, forward, generate, inputs, make

hub = {"attn_implementation": "owner/tilewise", "allow_all_kernels": True}
far, ran = {}, {}

def compare(name, given, model, changed):
    wanted = forward(model, given), generate(model, given)
    model = changed(model)
    assert model.config._attn_implementation == "owner/tilewise"
    (loaded,) = kernels.get_loaded_kernels()
    with loaded.module.count_calls() as calls:
        found = forward(model, given), generate(model, given)
    far[name], ran[name] = difference(found[0], wanted[0]), calls.ran["cpu"]
    assert found[1][0].equal(wanted[1][0]), name

def set_to_hub(model):
    model.set_attn_implementation(**hub)
    return model

def loaded_again(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, **hub).eval()

for name in ("llama", "gemma2", "gpt_oss"):
    compare(name, inputs(name, "left"), make(name), set_to_hub)
compare("from_pretrained", inputs("llama", "none"), make("llama"), loaded_again)
print(json.dumps([far, ran]))
"""


def test_models_of_transformers_run_on_it(folder):
    """Padded, windowed, with softcap and sinks: logits, gradients and tokens are those of eager attention."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    environment = os.environ | {
        "LOCAL_KERNELS": f"owner/tilewise={folder}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", MODELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    far, ran = json.loads(done.stdout.splitlines()[-1])
    assert max(far.values()) < 1e-5
    assert ran == dict.fromkeys(far, 2 + 10 * 2)  # both layers, in one forward and for every token
