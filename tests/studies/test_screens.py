"""The pages of docs/results: each opens with an answer, one picture and one table, whose numbers are the results'."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "pictures"))
import readme
import screens

from studies.bench.results import RESULTS
from studies.pages.marked import MARKED, filled

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    MARKED,
    re.compile(r"<!--.*?-->|<[^>]*>|(?<=\])\([^)]*\)|`[^`]*`"),  # comments, tags, links' addresses, code
    re.compile(r"(?<![A-Za-z0-9])[A-Za-z]+[-_]?\d\w*|-\d\b|\b124M\b"),  # H200, FlashAttention-3 and -4, GPT-2 124M
    re.compile(r"\bhead size \d+|\b\d+k (?:keys|tokens)"),  # what was measured
)
"""Where a screen may have digits that no command writes."""


@pytest.fixture(scope="module")
def found():
    return screens.numbers(RESULTS)


def page(name):
    return (ROOT / "docs" / "results" / f"{name}.md").read_text()


def screen(name):
    """What stands above the first heading and the first folded part."""
    return re.split(r"^## |^<details>", page(name), maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", screens.PAGES)
def test_a_page_opens_with_an_answer_a_picture_and_a_table(name):
    first = screen(name)
    answer, _, rest = first.partition("![")
    assert re.search(r"\*\*.+\*\*", answer), "the answer is bold"
    assert "![" not in rest.partition("](../images/nvidia-h200-")[2].partition("(../images")[2]
    assert len(re.findall(r"^\| -|^\|-", first, re.MULTILINE)) == 1
    assert len(first.splitlines()) <= 40


@pytest.mark.parametrize("name", [*screens.PAGES, *(f"../{name}" for name in screens.MORE)])
def test_its_numbers_are_those_of_the_results(name, found):
    for _, marked, text, _ in MARKED.findall(page(name)):
        if marked not in ("measured", "pairs"):
            assert text == found[marked], "run python tools/report.py"


@pytest.mark.parametrize("name", screens.PAGES)
def test_its_digits_are_written_by_the_report(name):
    text = screen(name)
    for pattern in OUTSIDE:
        text = pattern.sub(" ", text)
    assert [line for line in text.splitlines() if re.search(r"\d", line)] == []


@pytest.mark.parametrize("name", ["tables", "accuracy", "accumulation"])
def test_the_gpu_comes_first_and_the_cpu_last(name):
    devices = re.findall(r"^## (.*(?:H200|EPYC).*)$", page(name), re.MULTILINE)
    assert devices[0] == "NVIDIA H200"
    assert devices[-1] == "AMD EPYC, 2 threads"


def test_every_number_of_the_screens_is_used(found):
    names = (*screens.PAGES, *(f"../{name}" for name in screens.MORE))
    used = {marked[1] for name in names for marked in MARKED.findall(page(name))}
    assert set(found) - used <= set(readme.measured(RESULTS))


def test_parts_that_are_not_found_stay(tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text("<!-- a -->1<!-- /a --> and <!-- b -->2<!-- /b -->")
    screens.fill(copy, {"b": "3"})
    assert copy.read_text() == "<!-- a -->1<!-- /a --> and <!-- b -->3<!-- /b -->"
    with pytest.raises(ValueError, match="names no number"):
        filled(copy.read_text(), {"b": "3"})
