"""README.md and README.zh-CN.md: their numbers are the results', what they claim is measured, and they stay short."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "pictures"))
import bars
import readme

from studies.bench import state
from studies.bench.results import RESULTS
from studies.pages import report
from studies.pages.marked import MARKED

ROOT = Path(__file__).parents[2]
LINES = {"README.md": 110, "README.zh-CN.md": 45}
WORDS = 25
"""Of a sentence."""
OUTSIDE = (
    re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),  # code
    MARKED,
    re.compile(r"(?<=\])\([^)]*\)|<[^>]*>"),  # links' addresses, tags
    re.compile(r"^#.*$", re.MULTILINE),  # headings
    re.compile(r"\b(?:Python|PyTorch|Triton) \d+\.\d+"),  # versions
    re.compile(r"\b(?:19|20)\d\d\b"),  # years
    re.compile(r"\b(?:RTX|RX) \d+\b"),  # names
    re.compile(r"(?<![A-Za-z0-9])[A-Za-z]+[-_]?\d\w*"),  # H200, fp32, sm_90, FlashAttention-3
)
"""Where a page may have digits that no command writes."""


@pytest.fixture(scope="module")
def found():
    return readme.numbers(RESULTS)


def page(name):
    return (ROOT / name).read_text()


def prose(text):
    """A page without what may hold digits."""
    for pattern in OUTSIDE:
        text = pattern.sub(" ", text)
    return text


@pytest.mark.parametrize("name", readme.PAGES)
def test_every_digit_is_written_by_the_report(name):
    typed = [line for line in prose(page(name)).splitlines() if re.search(r"\d", line)]
    assert typed == [], "put these numbers between comments that tools/readme.py fills in"


def test_a_typed_number_is_found():
    typed = "It is 1.03x as fast, at 4k tokens, on 8 GPUs."
    assert re.findall(r"\d+", prose(typed)) == ["1", "03", "4", "8"]
    assert prose("FA3 on an H200, in 2024, with Python 3.10").split() == ["on", "an", ",", "in", ",", "with"]


@pytest.mark.parametrize("name", readme.PAGES)
def test_the_numbers_are_those_of_the_results(name, found):
    assert page(name) == readme.filled(page(name), found), "run python tools/report.py"


def test_every_number_is_used(found):
    pages = [*readme.PAGES, "docs/results/performance.md", "docs/results/fp32.md"]
    used = {marked[1] for name in pages for marked in MARKED.findall(page(name))}
    assert set(found) <= used


STAMPED = {number: stamp for stamp, numbers in readme.STAMPS.items() for number in numbers}
BY_THEMSELVES = {"numbers", "hopper", "fp32", "memory", "reference-lines", "many-gpus", "many-gpus-zh", "gpus-tried"}
"""Tables that hold their stamps, and what no kernel changes."""


@pytest.mark.parametrize("name", [*readme.PAGES, "docs/results/performance.md"])
def test_a_number_and_its_version_stand_on_one_line(name):
    for paragraph in re.split(
        r"\n(?=[-|*\n])", re.sub(r"<!-- numbers -->.*?<!-- /numbers -->", "", page(name), flags=re.DOTALL)
    ):
        names = {marked[1] for marked in MARKED.findall(paragraph)}
        for number in names & STAMPED.keys():
            assert STAMPED[number] in names, f"{name}: {number} says neither version nor date if its kernels change"


def test_every_number_has_a_version(found):
    assert set(found) == STAMPED.keys() | BY_THEMSELVES | readme.STAMPS.keys()


@pytest.mark.parametrize(("old", "said"), [([], False), (["hopper forward D128"], True), (None, True)])
def test_numbers_of_other_kernels_say_their_version_and_date(monkeypatch, old, said):
    monkeypatch.setattr(report.Origin, "changed_since", lambda self, env: old)
    found = readme.numbers(RESULTS)
    for stamp in readme.STAMPS:
        assert bool(re.fullmatch(r" \(v\d+\.\d+\.\d+, (\w+, )?20\d\d-\d\d-\d\d\)", found[stamp])) == said, stamp
    rows = found["numbers"].partition("measured |")[2].strip().splitlines()[1:]
    measured = [row.split("|")[-2].strip() for row in rows if row.startswith("| ")]
    assert len(measured) >= 7
    assert all((of == "shipped kernels") != said for of in measured)
    for table in ("hopper", "fp32", "memory"):
        assert ("(v0." in found[table]) == said, table


def test_kernels_are_compared_by_their_states():
    now = state.states(chips=("hopper",))
    env = {
        "when": "2026-11-27T00:00:00",
        "commit": "abcdef012345",
        "kernels": "told",
        "versions": {"tilewise": "0.2.0"},
    }
    names = ["hopper forward"]
    assert report.Origin({"kernels": {"told": now}}, {}, names).stamp(env) == ""
    other = now | {"hopper forward D64": "another"}
    assert report.Origin({"kernels": {"told": other}}, {}, names).stamp(env) == " (v0.2.0, abcdef0, 2026-11-27)"
    assert report.Origin({"kernels": {"told": other}}, {}, ["triton"]).stamp(env) == ""


def test_an_unknown_name_is_told(found):
    with pytest.raises(ValueError, match="<!-- nowhere --> names no number; choose from"):
        readme.filled("<!-- nowhere -->1<!-- /nowhere -->", found)


def test_what_the_first_sentence_claims_is_measured(found):
    """On Hopper as fast as the fastest of cuDNN, FlashAttention-3 and -4, in the mean of all shapes."""
    assert "as fast as cuDNN, FlashAttention-3 and FlashAttention-4 on Hopper" in page("README.md")
    assert float(found["fastest-forward"]) >= 1.0
    assert float(found["fastest-backward"]) >= 1.0


def test_the_caption_names_every_bar_that_is_missing(found):
    assert bars.LENGTHS == readme.CHART_LENGTHS
    every = {(pass_, size, name) for pass_ in bars.PASSES for size in bars.SIZES for name in bars.BARS}
    missing = sorted(every - set(bars.speeds()))
    assert {name for _, _, name in missing} == {"flash-attn 3"}
    said = re.findall(r"no (forward|backward) bar at head size ([\d and]+\d)", found["chart"])
    told = [(pass_, int(size)) for pass_, sizes in said for size in sizes.split(" and ")]
    assert sorted(told) == [(pass_, size) for pass_, size, _ in missing]


@pytest.mark.parametrize("name", readme.PAGES)
def test_it_stays_short(name):
    assert len(page(name).splitlines()) <= LINES[name]


def test_sentences_are_short():
    lines = [line for line in prose(page("README.md")).splitlines() if line.strip() and not line.startswith("|")]
    for sentence in re.split(r"[.:;!?](?:\s|\*|$)", "\n".join(lines)):
        assert len(re.findall(r"[A-Za-z][\w'-]*", sentence)) <= WORDS, sentence


def test_the_chinese_page_runs_the_same_calls():
    blocks = [re.findall(r"^```python\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL) for name in readme.PAGES]
    english, chinese = ([re.sub(r" *#.*", "", code) for code in of] for of in blocks)
    assert chinese == english[:1]


def test_it_shows_what_is_less_than_a_yes():
    short = re.findall(
        r"^\| ([^|]+) \| (compiled only|.*tried on [^|]+|.*by name[^|]*) \|", page("README.md"), re.MULTILINE
    )
    assert [row for row, _ in short] == ["AMD GPUs", "fp8", "context parallelism"]
