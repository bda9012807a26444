"""How racecheck's reports are read and judged, and that the control is right: needs no GPU, nor racecheck."""

import re

import pytest
from hopper import racecheck
from scripts import RELEASES, folder_of, lines


def line(file, text):
    """The first line of ours that holds a text, as racecheck names it."""
    lines = racecheck.FILES[file].read_text().splitlines()
    return f"{file}:{next(n for n, found in enumerate(lines, 1) if text in found)}"


def said_of(*pairs, first="Write", other="Read"):
    """racecheck's output about accesses and those that they race with: a kernel and two lines each."""
    reports = [
        f"========= Error: Race reported between {first} access at {kernel}+0x6e80 in {at}\n"
        f"=========     and {other} access at {kernel}+0x74e0 in {against} [128 hazards]\n"
        f"=========     and {other} access at {kernel}+0x7500 in {against} [12 hazards]\n=========\n"
        for kernel, at, against in pairs
    ]
    n, s = len(pairs), "s" * (len(pairs) != 1)
    summary = f"========= RACECHECK SUMMARY: {n} hazard{s} displayed ({n} error{s}, 0 warnings)\n"
    return "".join(["========= COMPUTE-SANITIZER\nran all\n", *reports, summary])


def pair(kernel, file, *texts):
    """A kernel, and two places of a file."""
    return kernel, *(line(file, text) for text in texts)


TILE_ID = pair("attention_forward", "parts/queue.py", ".store(gl.full", ".load(")
WAITED = (*TILE_ID[:2], line("parts/channel.py", "mbarrier.wait"))
FETCHED = pair("attention_backward", "parts/queue.py", *["gl.num_programs(0) + gl.atomic_add"] * 2)
P = pair(
    "attention_backward_by_gradient", "backward/by_gradient.py",
    "stage(shared.p.memory, z).store", "stage(shared.p.memory, z).load",
)  # fmt: skip
ROLES = pair("attention_backward", "backward/kernel.py", "def attention_backward(", "gl.warp_specialize(")
IN_IF = pair("attention_forward", "forward/kernel.py", "    if DROPOUT_WARPS:", "def attention_forward(")
LOST = pair("attention_backward", "backward/gradients.py", "stage(shared.ds.memory", "shared.logs, y).load")
WARP = pair("control", "control.py", "number.store(", "number.load(")
GROUP = pair("control", "control.py", "row.store(", "row.load(")
DRAW = pair("control", "control.py", *["gl.atomic_add"] * 2)
START = pair("control", "control.py", "def send_dq(", "gl.warp_specialize(")
KINDS = {
    racecheck.FROM_A_WARP: (WARP, TILE_ID, WAITED),
    racecheck.FROM_A_GROUP: (GROUP, P),
    racecheck.DRAW: (DRAW, FETCHED),
    racecheck.LAUNCH: (START, ROLES, IN_IF),
    racecheck.ELSEWHERE: (LOST, (*LOST[:2], TILE_ID[2]), (TILE_ID[0], TILE_ID[1], LOST[2])),
}


def test_reports_are_read():
    (report,) = racecheck.read(said_of(TILE_ID))
    write, load = (int(at.removeprefix("parts/queue.py:")) for at in TILE_ID[1:])
    assert report.access == ("Write", "attention_forward", "parts/queue.py", write)
    assert report.others == (("Read", "attention_forward", "parts/queue.py", load),) * 2
    assert racecheck.read(said_of()) == []
    assert len(racecheck.read(said_of(TILE_ID, ROLES))) == 2
    assert racecheck.read(said_of(TILE_ID).replace("\n=========     and", " and")) == [report]


def test_a_file_goes_by_its_path_however_much_of_it_racecheck_says():
    for name, path in racecheck.FILES.items():
        assert racecheck.name_of(str(path)) == racecheck.name_of(f"hopper/{name}") == name
    assert racecheck.name_of("queue.py") == "parts/queue.py"
    for other in ("kernel.py", "elsewhere/queue.py", "ue.py", ""):
        assert racecheck.name_of(other) == other


def test_a_report_without_lines_is_of_no_kind():
    for lost in (r" in parts/queue\.py:\d+", r"parts/queue\.py"):
        (report,) = racecheck.read(re.sub(lost, lambda m: "" if ":" in m[0] else "other.py", said_of(TILE_ID)))
        assert report.kinds() == {racecheck.ELSEWHERE}, str(report)


@pytest.mark.parametrize(("kind", "pair"), [(kind, pair) for kind, pairs in KINDS.items() for pair in pairs])
def test_a_report_is_of_a_kind_either_way_round(kind, pair):
    kernel, write, load = pair
    reports = [
        *racecheck.read(said_of((kernel, write, load))),
        *racecheck.read(said_of((kernel, load, write), first="Read", other="Write")),
    ]
    assert [report.kinds() for report in reports] == [{kind}] * 2
    unordered = racecheck.LAUNCH if kind == racecheck.LAUNCH else racecheck.ELSEWHERE
    for both in {"Read", "Write"} if write != load else {"Read"}:
        (report,) = racecheck.read(said_of(pair, first=both, other=both))
        assert report.kinds() == {unordered}


@pytest.mark.parametrize(("kind", "pair"), [(kind, pair) for kind in list(KINDS)[:3] for pair in KINDS[kind]])
def test_a_place_may_be_written_again(kind, pair):
    (report,) = racecheck.read(said_of((pair[0], pair[1], pair[1]), other="Write"))
    assert report.kinds() == {kind + racecheck.AGAIN}
    (report,) = racecheck.read(said_of((pair[0], pair[1], LOST[1]), other="Write"))
    assert report.kinds() == {racecheck.ELSEWHERE}


@pytest.mark.parametrize(
    "control", [(), (WARP,), (START,), (DRAW, WARP, START), (GROUP,), tuple(KINDS[racecheck.ELSEWHERE])]
)
def test_only_the_control_excuses_a_report(control):
    of_control = [("control", *pair[1:]) for pair in control]
    broken = [("broken", *pair[1:]) for pair in (WARP, GROUP)]
    ours = [pair for pairs in KINDS.values() for pair in pairs if pair[0] != "control"]
    excused = {kind for kind in KINDS if kind != racecheck.ELSEWHERE and set(KINDS[kind]) & set(control)}
    left = racecheck.unexcused(racecheck.read(said_of(*of_control, *broken, *ours)))
    assert len(left) == sum(pair[0] != "control" for kind in set(KINDS) - excused for pair in KINDS[kind])
    assert {kind for report in left for kind in report.kinds()} == set(KINDS) - excused


@pytest.mark.parametrize(
    "said",
    [
        "",
        said_of(TILE_ID).replace("1 hazard displayed (1 error", "1 hazard displayed (7 errors"),
        said_of(TILE_ID).replace("Race reported between Write access", "Race between a write access"),
        said_of(TILE_ID).replace(" and Read access at", " and elsewhere"),
    ],
    ids=["no summary", "reports held back", "other words", "one access"],
)
def test_output_that_is_not_understood_is_no_silence(said):
    with pytest.raises(ValueError, match=r"not understood|reports were read"):
        racecheck.read(said)


@pytest.mark.compile
@pytest.mark.parametrize("release", RELEASES)
def test_the_control_is_right(release):
    """In PTX a wait stands before every access that an arrival follows, and a barrier of the role's warps between the
    two, as it does between a store and a load of the same role."""
    rows = lines("hopper/offline_control.py", folder=folder_of(release))
    found = {row["kernel"]: row["events"] for row in rows}
    assert set(found) == {racecheck.CONTROL, racecheck.BROKEN}
    for kernel, before in ((racecheck.CONTROL, {"wait"}), (racecheck.BROKEN, {"load", "arrive", "together"})):
        events = f"arrive {found[kernel]}"
        for access in ("store", "load"):
            seen = set(re.findall(rf"(\w+) {access} together arrive", events))
            assert seen, events
            assert seen <= before, events
        assert not re.search(r"(store|load) arrive|store load", events), events
