"""Fill in what stands between two comments that name it: <!-- name --> and <!-- /name -->."""

import re
from pathlib import Path

MARKED = re.compile(r"(<!-- ([\w-]+) -->)(.*?)(<!-- /\2 -->)", re.DOTALL)


def filled(text: str, found: dict[str, str]) -> str:
    """Return the page with these texts.

    Raises ValueError if a comment names none.
    """

    def value(marked: re.Match[str]) -> str:
        if marked[2] not in found:
            raise ValueError(f"<!-- {marked[2]} --> names no number; choose from {', '.join(found)}")
        return f"{marked[1]}{found[marked[2]]}{marked[4]}"

    return MARKED.sub(value, text)


def write(page: Path, found: dict[str, str]) -> Path:
    """Rewrite those parts of a page that are found; the others stay."""
    text = page.read_text()
    page.write_text(filled(text, {marked[1]: marked[2] for marked in re.findall(MARKED, text)} | found))
    return page
