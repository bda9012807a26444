"""docs/learn: every snippet runs and prints what the page shows, every excerpt is in its file, exercises are real."""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
EXERCISES = LEARN / "exercises"
PAGES = "1-standard", "2-flash1", "3-flash2", "4-flash3"
LANGUAGES = "en", "zh"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r'python title="([^"]+)"')
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
WHY = {
    "en": re.compile(r"^> \*\*Why (\w+) exists\.\*\*", re.MULTILINE),
    "zh": re.compile(r"^> \*\*为什么需要 (\w+)。\*\*", re.M),
}
INTRODUCED = {"1-standard": ["m", "l"], "2-flash1": ["alpha", "lse", "delta"]}
each_page = pytest.mark.parametrize("page", PAGES)
each_language = pytest.mark.parametrize("language", LANGUAGES)


class Block(NamedTuple):
    """Of code: what stands behind the opening fence, and the lines."""

    info: str
    code: str


def text(language, page):
    return (LEARN / language / f"{page}.md").read_text(encoding="utf-8")


def blocks(language, page):
    return [Block(*found) for found in FENCE.findall(text(language, page))]


@each_page
def test_every_snippet_runs_and_prints_what_is_shown(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = {"__name__": "__main__"}
    shown = blocks("en", page)
    snippets = 0
    for number, (block, after) in enumerate(pairwise([*shown, Block("", "")])):
        if block.info == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, f"{page}.md, block {number}", "exec"), names)
            assert printed.getvalue() == (after.code if after.info == "text" else ""), block.code
            snippets += 1
    assert snippets > 4


@each_page
def test_both_languages_show_the_same(page):
    assert blocks("en", page) == blocks("zh", page)
    for shape in (re.compile(r"^#+ ", re.M), re.compile(r"^!\[.*?\]\((.*)\)", re.M), re.compile(r"^\$\$", re.M)):
        assert shape.findall(text("en", page)) == shape.findall(text("zh", page))


@each_page
def test_an_excerpt_is_in_its_file(page):
    excerpts = [(found[1], block.code) for block in blocks("en", page) if (found := EXCERPT.fullmatch(block.info))]
    assert len(excerpts) > 4
    for path, code in excerpts:
        assert stripped(code) in stripped((ROOT / path).read_text()), f"{path} has no lines\n{code}"
    known = {"python", "text", "sh"}
    assert {block.info for block in blocks("en", page) if not EXCERPT.fullmatch(block.info)} <= known


def stripped(code):
    """Without indentation."""
    return "\n".join(line.strip() for line in code.splitlines())


@each_language
@each_page
def test_why_a_number_exists_is_said_once(language, page):
    assert WHY[language].findall(text(language, page)) == INTRODUCED.get(page, [])


@each_language
@each_page
def test_links_and_pictures_exist(language, page):
    links = LINK.findall(FENCE.sub("", text(language, page)))
    assert any(link.endswith(".png") for link in links)
    for link in links:
        assert (LEARN / language / link).exists(), link


def test_the_contents_name_every_page():
    links = LINK.findall((LEARN / "index.md").read_text(encoding="utf-8"))
    assert {f"{language}/{page}.md" for language in LANGUAGES for page in PAGES} <= set(links)
    for link in links:
        assert (LEARN / link).exists(), link


@each_language
@each_page
def test_formulas_are_whole(language, page):
    """GitHub wants both dollars of a formula in one line."""
    for line in FENCE.sub("", text(language, page)).splitlines():
        assert line.replace("$$", "").count("$") % 2 == 0, line


# Exercises


@each_language
@each_page
def test_a_page_ends_with_its_exercises(language, page):
    number = PAGES.index(page) + 1
    end = text(language, page).rsplit("\n## ", 1)[1]
    tree = ast.parse((EXERCISES / f"page{number}.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert re.findall(r"^\d\. `(\w+)`", end, re.MULTILINE) == functions
    assert 2 <= len(functions) <= 3
    assert f"python -m pytest docs/learn/exercises/test_page{number}.py" in end


def test_exercises_fail_until_solved():
    outcomes = check()
    assert outcomes
    assert set(outcomes.values()) == {"FAILED"}


def test_exercises_can_be_solved():
    outcomes = check(Path(__file__).parent / "solutions")
    assert outcomes.keys() == check().keys()
    assert set(outcomes.values()) == {"PASSED"}


@cache
def check(*first):
    """What becomes of each test of the exercises, with modules from other folders before those to fill in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    searched = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(searched), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider", str(EXERCISES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    outcomes = dict(re.findall(r"^(\S+::\S+) (PASSED|FAILED|ERROR)", done.stdout, re.MULTILINE))
    failed = re.findall(r"^FAILED \S+ - (\w+)", done.stdout, re.MULTILINE)
    assert all("NotImplementedError".startswith(name.rstrip(".")) for name in failed), done.stdout
    assert re.search(rf"\b{len(outcomes)} (passed|failed)", done.stdout), done.stdout + done.stderr
    return outcomes
