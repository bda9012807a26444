"""Names that a reader of the field would not know were replaced, and do not come back."""

import re
from pathlib import Path

import pytest

import tilewise as tw

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"\bplace=": "origin=",
    r"handed[ _]back|hands? (it |them )?back": "fell back",
    r"\b(heads|weigh)_in_turn\b": "heads_serially, join_halves",
    r"\b_?(forward_|backward_)?of_codes\b": "quantized",
    r"\blaunch_kept\b|\bkept_launches\b": "launch_replayed, replays_of",
    r"\bclass (Walk|Visit)\b|\bvisits:": "Ring, Block, blocks",
    r"\bknown\.py\b": "calls.py",
    r"\btile\.(FRESH|SUMS)\b|\bFRESH\b": "PROMOTE, SUM_BY_PRODUCT",
    r"\bload_turned\b|\bturned\b(?! into)|\bturns? (q|k|q and k)\b": "with rotary",
    r"\bdef told\b|\btold\b( =|\()": "gathered, described, in words",
    r"\.kept\b": "extra, launches, computed",
    r"\bbenchmarks/seen\b|--seen\b": "benchmarks/results, --results",
}
"""What replaced each."""
OLD = {"docs/internals/adr": "records", "src/tilewise/call/count.py": "an alias", "CHANGELOG.md": "what a user renames"}
"""Where an earlier name may stand, and why."""


def texts():
    """The package, the studies and the documents, each file with its path."""
    for folder, ending in (("src", "py"), ("studies", "py"), ("tools", "py"), ("docs", "md"), (".", "md")):
        for path in sorted((ROOT / folder).glob(f"*.{ending}" if folder == "." else f"**/*.{ending}")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(tuple(OLD)):
                yield name, path.read_text()


@pytest.mark.parametrize("old", INSTEAD)
def test_an_earlier_name_is_gone(old):
    found = [f"{name}: {match[0]}" for name, text in texts() for match in re.finditer(old, text)]
    assert not found, f"write {INSTEAD[old]}"


def test_a_count_has_its_earlier_name_with_a_warning():
    with tw.count_calls() as calls:
        pass
    with pytest.warns(FutureWarning, match="handed_back is called fell_back"):
        assert calls.handed_back is calls.fell_back
