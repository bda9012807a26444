"""`make demo` where PyTorch brings no Triton, and its page on a phone."""

import subprocess
import sys
from pathlib import Path

import torch

from studies import environment
from studies.bench.results import environment as machine
from studies.bench.suites import SUITES
from studies.demo.page import write_page
from studies.training.comparison import NAMES, Comparison
from studies.training.pictures import training
from studies.training.trainer import Settings

ROOT = Path(__file__).parents[2]
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
OVERHANG = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def run(*command, **variables):
    env = environment(OMP_NUM_THREADS="1", **variables)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_the_demo_runs_to_its_page_without_triton(tmp_path):
    """Two steps and no benchmark: CI checks the whole."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None  # in its trainings, too\n")
    out = tmp_path / "out"
    options = ("demo", "--device", "cpu", "--steps", "2", "--seconds", "0", "--out", str(out))
    status, shown, complaints = run("-m", "studies", *options, PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}:{ROOT}")
    assert status == 0, complaints
    assert "import of triton halted" in shown
    assert "The losses are equal but for rounding" in shown
    assert (out / "index.html").read_text().count("data:image/png;base64,") == 1
    status, _, complaints = run(".ci/check_demo.py", str(out))
    assert status == 1
    assert complaints
    assert "benchmark" in complaints
    assert "training with" not in complaints, complaints


def test_the_page_fits_a_phone(browse, tmp_path):
    losses = {name: [5.0, 4.0] for name in NAMES}
    sizes = dict.fromkeys(NAMES, 4 * 10**8)
    compared = Comparison(Settings.fitting(torch.device("cpu")), "cpu", losses, dict.fromkeys(NAMES, 123.4), sizes)
    picture, page = tmp_path / "training.png", tmp_path / "index.html"
    training(compared, picture)
    env = machine(torch.device("cpu"))
    write_page(page, compared, (SUITES["cpu"], ["a headline"], [(picture, "a picture")]), picture, env)
    for options in ({}, PHONE):
        shown = browse(page.as_uri(), **options)
        assert shown.evaluate(OVERHANG) == 0
        assert shown.evaluate("innerWidth") == options.get("viewport", {"width": 1280})["width"]
    widths = shown.evaluate("[...document.images].map(image => image.width)")
    assert all(width > 600 for width in widths), "pictures scroll, so that they can be read"
