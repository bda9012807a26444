"""What the documentation shows runs: the README, the guide, and both worked examples of CONTRIBUTING.md."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tilewise as tw
from hub.write import write as write_hub
from tilewise.triton.tiles import TARGETS
from tilewise.values.products import PRECISIONS
from tilewise.values.value import Value

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
PLACE = re.compile(r"^# (?:at the end of|in) (\S+)\n")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/use/*.md", "docs/internals/**/*.md", "docs/results/*.md")
    for path in ROOT.glob(pattern)
)


def snippets(page, language="python"):
    """The code blocks of a page in a language."""
    return [code for found, code in FENCE.findall((ROOT / page).read_text()) if found == language]


GUIDE = snippets("docs/use/guide.md")
IN_ORDER = (
    "quickstart", "with-sdpa", "with-transformers", "with-diffusers", "with-hub", "from-sdpa", "from-flash-attn",
    "from-flexattention", "serve", "many-gpus",
)  # fmt: skip
CLIENTS = {"with-transformers": "transformers", "with-diffusers": "diffusers", "with-hub": "kernels"}
SOURCES = ("src", "studies", "tools", "tests")


@pytest.fixture(autouse=True)
def _as_for_a_user():
    """As outside the tests: fresh memory is not poisoned; afterwards torch's settings are what they were."""
    poisoned, precision = torch.utils.deterministic.fill_uninitialized_memory, torch.get_float32_matmul_precision()
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = poisoned
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()


@pytest.mark.parametrize("index", range(len(snippets("README.md"))))
def test_the_readme_runs(index):
    names = {"__name__": "__main__"}
    exec(compile(snippets("README.md")[index], f"README.md, block {index}", "exec"), names)
    assert names["o"].isfinite().all()


@pytest.mark.parametrize("index", range(1, len(GUIDE)))
def test_the_guide_runs(index):
    names = {"__name__": "__main__"}
    for code in (GUIDE[0], GUIDE[index]):
        exec(compile(code, f"docs/use/guide.md, block {index}", "exec"), names)
    results = [value for value in names.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    assert results
    assert not any(value.isnan().any() for value in results if not value.is_meta)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", IN_ORDER)
def test_pages_for_newcomers_run_in_order(page, monkeypatch, tmp_path):
    if client := CLIENTS.get(page):
        pytest.importorskip(client, reason=f"{client} is not installed")
    if page == "with-hub":
        write_hub(tmp_path / "out" / "hub")
        monkeypatch.chdir(tmp_path)
    blocks, module = snippets(f"docs/use/{page}.md"), ModuleType("newcomer")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # torch.compile looks up its globals there
    assert len(blocks) >= 3
    for index, code in enumerate(blocks):
        exec(compile(code, f"docs/use/{page}.md, block {index}", "exec"), vars(module))


def test_every_environment_variable_is_told():
    page = (ROOT / "docs/use/environment.md").read_text()
    sources = [ROOT / "Makefile", *(path for name in SOURCES for path in (ROOT / name).rglob("*.py"))]
    used = {name for path in sources for name in re.findall(r"\bTILEWISE_[A-Z_]+\b", path.read_text())}
    assert "TILEWISE_TILES" in used
    assert set(re.findall(r"^\| `(TILEWISE_[A-Z_]+)`", page, re.MULTILINE)) == used


@pytest.mark.compile
def test_contributing_works(tmp_path):
    """Applies both examples to a copy of the package, and runs their cases on the CPU and in Triton's interpreter; the
    mask, which has no tensors and whose tiles are listed, is compiled for Hopper, too."""
    pytest.importorskip("triton")
    tools = "tests/hopper/offline.py", "tests/triton/offline.py"
    helpers = "conftest", "interpreter", "known", "registers"
    for name in ("src", "tests/conformance", *(f"tests/{name}.py" for name in helpers), "pyproject.toml", *tools):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    for code in snippets("CONTRIBUTING.md"):
        path = placed(code, tmp_path)
        path.write_text(f"{path.read_text()}\n\n{PLACE.sub('', code)}")
    for change in snippets("CONTRIBUTING.md", "diff"):
        apply(change, tmp_path)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    searched = os.pathsep.join(filter(None, (str(tmp_path / "src"), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": searched, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    (command,) = [code for code in snippets("CONTRIBUTING.md", "sh") if "-k" in code]
    arguments = re.findall(r'"[^"]*"|\S+', command)
    assert arguments[:3] == ["python", "-m", "pytest"]
    done = subprocess.run(
        [sys.executable, *(a.strip('"') for a in arguments[1:])],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 9, done.stdout  # three cases, on the CPU's two paths and in the interpreter
    cached = (
        "import torch, tilewise as tw; q, mask = torch.randn(1, 19, 1, 8), tw.Streaming(4, 8);"
        "found = [tw.attention(q, q, q, mask=mask, layout=lies) for lies in (None, tw.Cached(torch.tensor([19])))];"
        "torch.testing.assert_close(*found)"
    )
    done = subprocess.run(
        [sys.executable, "-c", cached], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, "its rows count from the last, which a cache knows: " + done.stderr
    done = subprocess.run(
        [sys.executable, tools[0], "streaming"],
        cwd=tmp_path, env=environment | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    small, large = (64, 96, 128), (160, 192, 224, 256)
    assert {(row["kernel"], row["D"]) for row in found} == {
        *product(("attention_forward", "attention_backward"), small),
        *product(("attention_forward", "attention_backward_by_gradient"), large),
    }
    assert all(row["matrix"] == ["HGMMA"] for row in found), found


def placed(code, root):
    """The file that a block names in its first line."""
    found = PLACE.match(code)
    assert found, f"this block does not say where it belongs:\n{code}"
    return root / found[1]


def apply(change, root):
    """A block of context, - and + lines; what is without + must be in the file, once."""
    path = placed(change, root)
    lines = PLACE.sub("", change).splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} places like\n{before}"
    path.write_text(text.replace(before, after))


def test_the_readme_and_the_guide_name_every_mask_and_score():
    values = [name for name in tw.__all__ if inspect.isclass(kind := getattr(tw, name)) and issubclass(kind, Value)]
    assert "Window" in values
    for name in {*values, "Padding"} - {"Mask", "Score"}:
        assert name in (ROOT / "README.md").read_text(), name
        assert f"tw.{name}(" in "".join(GUIDE), name


def test_support_names_every_chip_and_precision():
    table = [line for line in (ROOT / "docs/use/support.md").read_text().splitlines() if line.startswith("| ")]
    (chips,) = [line for line in table if line.startswith("| chips")]
    assert {target.strip("smgfx_") for target in TARGETS} == set(re.findall(r"(?<=[ _x])\d+a?\b", chips))
    (precisions,) = [line for line in table if line.startswith("| fp32 precision")]
    assert [name for name in PRECISIONS if not re.search(rf"\b{name}\b", precisions)] == []
    assert set(re.findall(r"\b(?:sm_|gfx)\w+", (ROOT / "README.md").read_text())) <= set(TARGETS)


def test_lines_quoted_from_the_source_are_there():
    text = (ROOT / "docs/results/fp32.md").read_text()
    quoted = 0
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for before, code in zip(parts[::2], parts[1::2], strict=False):  # behind the last one there is text alone
        if sources := re.findall(r"\]\(\.\./\.\./(src/[^)]+\.py)\)", before):
            source = sources[-1]
        assert flush_left(code) in flush_left((ROOT / source).read_text()), f"{source} has no lines\n{code}"
        quoted += 1
    assert quoted > 10


def test_the_tables_of_registers_are_what_the_tests_compile():
    record = json.loads((ROOT / "tests/hopper/spills.json").read_text())["3.6.0"]
    written = {}
    for page in (ROOT / "docs/internals").glob("hopper-*.md"):
        for kernel, size, call, spills in re.findall(
            r"^\| (\w+) \| (\d+) \| ([\w, ]+) \| \d+ \| [\d, ]+ \| (\w+) \|", page.read_text(), re.MULTILINE
        ):
            written[f"{kernel} {size} {call}"] = 0 if spills == "none" else int(spills)
    measured = {name: row["spills"] for name, row in record.items() if not name.endswith("biased")}
    assert written == measured, "run python tools/resources.py"


def flush_left(code):
    """Lines without what they are indented by, and without the last line's end."""
    return "\n".join(line.strip() for line in code.strip().splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target
