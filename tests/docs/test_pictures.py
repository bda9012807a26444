"""The pictures of docs/internals, docs/learn and the README: all are drawn, and schedules are possible ones."""

import re
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "pictures"))
import draw
import palette
from machine import Machine, busy, makespan
from pipelines import ADD, GROUPS, STAGES, TENSOR, TMA, Backward, Forward, channel, order
from timelines import FORWARDS

DOCS = Path(draw.__file__).parents[1]


def forward(*how):
    """A pipeline runs once, so each call makes its own."""
    return Forward(*how).run()


def backward(*how):
    return Backward(*how).run()


SCHEDULES = {
    f"forward {d}, overlap {overlap}, in step {in_step}": partial(forward, d, 128, 8, overlap, in_step)
    for d, overlap, in_step in product((64, 128), (False, True), (False, True))
} | {
    "backward 64": partial(backward, 64, 128, 6),
    "backward 128": partial(backward, 128, 64, 6),
    "channel, slow producer": partial(channel, 7, 500.0, 100.0),
    "channel, slow consumers": partial(channel, 7, 100.0, 500.0),
    "fixed order": partial(order, 8, 4, 6, 4, False),
    "counter": partial(order, 8, 4, 6, 4, True),
}
DRAWN = [(overlap, in_step) for _, overlap, in_step in FORWARDS]


def described(path):
    """What stands in a picture."""
    if path.suffix == ".svg":
        return re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)[1]
    with Image.open(path) as picture:
        return picture.info["Description"]


def size(path):
    """The height and width of a picture, in pixels; an svg counts 96 of them for 72 points."""
    if path.suffix == ".svg":
        found = re.search(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt"', path.read_text())
        return float(found[2]) / 72 * 96, float(found[1]) / 72 * 96
    return draw.plt.imread(path).shape[:2]


def by_name(spans):
    """Spans under their name and group."""
    found = {(span.name, span.group): span for span in spans}
    assert len(found) == len(spans)
    return found


def test_every_picture_of_the_pages_is_drawn(tmp_path):
    internals = DOCS / "internals"
    pages = [path.read_text() for path in [*internals.glob("hopper-*.md"), internals / "architecture.md"]]
    wanted = set(re.findall(r"\]\(\.\./images/(\S+)\)", "".join(pages)))
    for page in DOCS.glob("learn/en/*.md"):
        wanted |= set(re.findall(r"\]\(\S+images/(learn-\S+)\)", page.read_text()))
    for page in DOCS.parent.glob("README*.md"):
        wanted |= set(re.findall(r'src(?:set)?="docs/images/([^"]+)"', page.read_text()))
    wanted |= set(re.findall(r"images/(parallel-\S+)\)", (DOCS / "use" / "many-gpus.md").read_text()))
    wanted |= set(re.findall(r"images/(mod-\S+)\)", (DOCS / "use" / "change-attention.md").read_text()))
    drawn = draw.draw(tmp_path)
    assert {path.name for path in drawn} == wanted
    for path in drawn:
        height, width = size(path)
        assert 600 < width < 1000, f"{path.name} is {width} wide: GitHub shows about 850"
        assert height < 1000
        assert described(path) == described(DOCS / "images" / path.name), (
            f"{path.name} is older: `make report` draws it"
        )


def test_a_picture_stays_until_it_shows_something_else(tmp_path):
    def drawn(name, shade):
        path = tmp_path / name
        told = PngInfo()
        told.add_text("Description", "words")
        Image.new("RGB", (64, 64), (shade, 0, 0)).save(path, pnginfo=told)
        return path

    kept = tmp_path / "kept.png"
    assert palette.replace(drawn("a.png", 200), kept)
    with Image.open(kept) as picture:
        assert (picture.mode, picture.info["Description"]) == ("P", "words")
    assert not palette.replace(drawn("b.png", 200), kept)
    assert palette.replace(drawn("c.png", 100), kept)


def test_pictures_are_small():
    files = [file for file in (DOCS / "images").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 1_600_000


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_possible(name):
    spans = SCHEDULES[name]()
    for unit in {span.unit for span in spans}:
        mine = sorted((span for span in spans if span.unit == unit), key=lambda span: span.start)
        assert all(a.end <= b.start for a, b in pairwise(mine)), f"{unit} does two things at once"
    for span in spans:
        assert span.over.at == span.end > span.start
        assert all(event.at <= span.start for event in span.needs), f"{span.name} starts before what it needs"


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name.startswith("forward")])
def test_the_forward_fills_a_stage_only_when_it_is_free(name):
    at = by_name(SCHEDULES[name]())
    for j in range(STAGES, 8):
        for w in GROUPS:
            assert at[f"K({j})", None].start >= at[f"S({j - STAGES})", w].end
            assert at[f"V({j})", None].start >= at[f"PV({j - STAGES})", w].end


def test_the_backward_fills_a_stage_only_when_it_is_free():
    for name in ("backward 64", "backward 128"):
        at = by_name(SCHEDULES[name]())
        for y in range(STAGES, 6):
            for w in GROUPS:
                assert at[f"Q({y})", None].start >= at[f"dK({y - STAGES})", w].end
                assert at[f"dO({y})", None].start >= at[f"dV({y - STAGES})", w].end


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name.startswith("channel")])
def test_a_channel_alternates(name):
    at = by_name(SCHEDULES[name]())
    for n in range(7):
        reads = [at[f"read {n}", w] for w in GROUPS]
        assert all(read.start >= at[f"fill {n}", None].end for read in reads)
        if n + STAGES < 7:
            assert at[f"fill {n + STAGES}", None].start >= max(read.end for read in reads)


def test_both_ideas_of_the_forward_pay():
    none, inside, both = (makespan(forward(64, 128, 8, *how)) for how in DRAWN)
    assert both < 0.8 * inside < 0.8 * 0.9 * none


def test_at_head_size_128_overlap_alone_is_enough():
    none, inside, both = (busy(forward(128, 128, 64, *how), TENSOR) for how in DRAWN)
    assert none < 0.7
    assert 0.97 < inside < both < 1.0


@pytest.mark.parametrize(("d", "B_r"), [(64, 128), (128, 64)])
def test_dq_is_one_tile_late_and_waits_for_nobody(d, B_r):
    tiles = 6
    spans = backward(d, B_r, tiles)
    at = by_name(spans)
    for y in range(tiles - 1):
        for w in GROUPS:
            own = at[f"dS({y + 1})", w]
            dq = at[f"dQ({y})", w]
            assert dq.start >= own.end
            assert all(event.at <= own.end for event in dq.needs), "the other group's dS was not there yet"
    pieces = [span for span in spans if span.unit == ADD]
    assert len(pieces) == tiles * len(GROUPS)
    assert all(piece.start >= at[piece.name.replace("add", "dQ"), piece.group].end for piece in pieces)


@pytest.mark.parametrize("counter", [False, True])
def test_every_tile_is_taken_once(counter):
    spans = order(8, 5, 6, 2, counter)
    assert sorted(span.name for span in spans) == sorted(f"{h}, {i}" for h in range(5) for i in range(8))


def test_with_the_counter_programs_end_together():
    def ends(counter):
        spans = order(8, 4, 6, 4, counter)
        return [max(span.end for span in spans if span.unit == f"program {p}") for p in range(6)]

    fixed, drawn = ends(False), ends(True)
    assert max(drawn) - min(drawn) < max(fixed) - min(fixed)
    assert max(drawn) < max(fixed)


def test_the_machine_refuses_what_cannot_be():
    machine = Machine()
    with pytest.raises(ValueError, match="P starts before S: yield those first"):
        machine.start(TENSOR, "P", 1.0, needs=[machine.event("S")])

    def role():
        machine.start(TMA, "K", 1.0)
        yield machine.event("never")

    with pytest.raises(ValueError, match="a role waits for them: never"):
        machine.run(role())
    with pytest.raises(ValueError, match="K was done before"):
        machine.start(TMA, "K", 1.0)
