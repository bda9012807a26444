"""What several pages say is the same in all of them, and is what files and code say."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import independent

import tilewise as tw
from tilewise.call.count import Calls
from tilewise.values.products import FASTER

ROOT = Path(__file__).parents[2]
MANY = ("README.md", "docs/use/faq.md", "docs/use/support.md", "docs/use/many-gpus.md")
ABOUT = re.compile(r"tested on CPUs|two H100s|four H100s")


def page(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", MANY)
def test_pages_agree_about_many_gpus(name):
    """One sentence, drawn from one file; beside it only sections that show what those GPUs did."""
    sentence = independent.many_gpus()["many-gpus"]
    text = page(name)
    assert text.count(f"<!-- many-gpus -->{sentence}<!-- /many-gpus -->") == 1
    rest = text.replace(sentence, "").partition("## What two GPUs did")[0]
    rest = re.sub(r"<!-- gpus-tried -->.*?<!-- /gpus-tried -->", "", rest)
    assert ABOUT.findall(rest) == []


def test_explain_gives_the_advice_of_the_page_on_eight_bits():
    found = independent.eight_bits()
    pairs = [(name, size) for name in independent.PRECISIONS for size in independent.SIZES]
    advice = {at: from_ for at in pairs if (from_ := independent.faster_from(found, *at))}
    assert advice == FASTER
    assert ("int8", 128) not in advice
    said = f'"fp8" from {advice["fp8", 128] >> 10}k tokens on, and for "int8" nowhere'
    assert said in " ".join(page("docs/use/guide.md").split())


def test_the_advice_follows_the_worst_measurement():
    cases = {("fp8", 128, causal, 4096): {"H100": 1.2, "H200": worst} for causal, worst in ((True, 0.9), (False, 1.1))}
    cases |= {("fp8", 128, causal, 16384): {"H100": 1.4, "H200": 1.1} for causal in (True, False)}
    assert independent.faster_from(cases, "fp8", 128) == 16384
    cases["fp8", 128, True, 4096]["H200"] = 1.01
    assert independent.faster_from(cases, "fp8", 128) == 4096
    cases["fp8", 128, False, 16384]["H200"] = 0.99
    assert independent.faster_from(cases, "fp8", 128) is None


def test_a_padded_row_is_zero_here_and_the_mean_of_v_in_eager_attention():
    """Why a loss on left-padded rows differs: docs/use/with-transformers.md."""
    q, k, v = (torch.randn(1, 4, 1, 8) for _ in range(3))
    real = torch.tensor([[False, True, True, True]])
    o = tw.attention(q, k, v, mask=tw.Causal() & tw.Padding(real))
    assert torch.equal(o[0, 0], torch.zeros(1, 8))
    hidden = torch.full((4,), torch.finfo(torch.float32).min)
    torch.testing.assert_close(torch.softmax(hidden, 0) @ v[0, :, 0], v[0, :, 0].mean(0))
    assert "predicted from such a position" in page("docs/use/with-transformers.md")


def test_the_page_says_what_run_prints_on_a_cpu():
    calls = Calls()
    calls.fell_back["it is on a CPU"] += 96
    assert str(calls) in page("docs/use/with-sdpa.md")
