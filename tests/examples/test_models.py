"""examples/models: each is short, runs alone, and learns or generates what it says."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import preloaded
import pytest
import torch

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "models"


TORCHVISION = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Without a GPU, torchvision's operators do not load, and its Python part needs only their names."""


def output(name, *clients, before="", folder=None):
    """The last line that an example prints; skip without its clients. `folder` may hold some of them."""
    if absent := [client for client in clients if find_spec(client) is None]:
        pytest.skip(f"{', '.join(absent)}: not installed")
    path = [str(ROOT / "src"), *filter(None, [folder])]
    code = f"""{before}
import runpy, sys
sys.path += {path}
runpy.run_path({str(MODELS / name)!r} + '.py', run_name='__main__')"""
    done = preloaded.run("-c", code, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def learned(line):
    """How many calls an example made, whose loss fell."""
    first, last, ran = re.match(r"loss (\S+) to (\S+); tilewise ran (\d+) calls", line).groups()
    assert float(last) < 0.6 * float(first)
    return int(ran)


def test_a_llama_learns_by_the_trainer():
    assert learned(output("llama_trainer", "transformers", "accelerate")) == 120


def test_a_flux_of_diffusers_learns():
    assert learned(output("flux_diffusers", "diffusers")) == 80


def test_a_vit_of_timm_learns(monkeypatch):
    if folder := os.environ.get("TILEWISE_TIMM"):
        monkeypatch.syspath_prepend(folder)
    before = "" if torch.cuda.is_available() else TORCHVISION
    assert learned(output("vit_timm", "timm", "torchvision", before=before, folder=folder)) == 60


def test_generation_is_eager_attentions():
    line = output("generate_static_cache", "transformers")
    assert line.startswith("3 of 3 continuations as with eager attention; tilewise ran 32 calls")


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.py")), ids=lambda path: path.stem)
def test_it_is_short(path):
    assert len(path.read_text().splitlines()) < (200 if path.stem == "serving" else 60)


def test_serving_is_generate_whatever_happens_to_pages():
    line = output("serving", "transformers")
    served, of, shared, freed, preempted = re.match(
        r"(\d+) of (\d+) requests as generate; {'shared': (\d+), 'freed': (\d+), 'preempted': (\d+)}", line
    ).groups()
    assert served == of == "12"
    assert min(int(shared), int(freed), int(preempted)) > 0
