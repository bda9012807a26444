"""docs/use/change-attention.md, in both languages: it runs, prints what it shows, and says the right classes."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tilewise as tw
from tilewise.program.shape import shape

USE = Path(__file__).parents[2] / "docs" / "use"
PAGES = {name: (USE / f"change-attention{name}.md").read_text() for name in ("", ".zh-CN")}
FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language="python"):
    return [code for found, code in FENCE.findall(PAGES[page]) if found == language]


@pytest.fixture(scope="module")
def page():
    """What the English page defines, as one file, and what it prints."""
    module, told = ModuleType("model"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "model", module)
        vars(module)["print"] = lambda *what, sep=" ": told.append(sep.join(map(str, what)))
        exec(compile("\n\n".join(blocks("")), "model.py", "exec"), vars(module))
    return module, "\n".join(told)


def test_it_prints_what_it_shows(page):
    _, told = page
    (shown,) = blocks("", "text")
    assert shown.strip() in told
    place, remedy = re.search(
        r"print\(error\)  # (.*?): \.\.\.\): \.\.\. (.*) \.\.\.$", PAGES[""], re.MULTILINE
    ).groups()
    assert place in told
    assert remedy in told


def test_the_chinese_page_has_the_same_code_and_pictures():
    english, chinese = ([re.sub(r" *#.*", "", code) for code in blocks(name)] for name in PAGES)
    assert chinese == english
    assert blocks(".zh-CN", "text") == blocks("", "text")
    english, chinese = (re.findall(r"\]\(([^)]+)\)", text) for text in PAGES.values())
    assert chinese[0] == "change-attention.md"
    assert english[0] == "change-attention.zh-CN.md"
    assert chinese[1:] == english[1:]


def test_there_are_ten_and_each_is_short():
    for text in PAGES.values():
        assert re.findall(r"^### (\d+)\.", text, re.MULTILINE) == [str(n) for n in range(1, 11)]
        assert len(re.findall(r"^!\[[^]]+\]\(\.\./images/mod-\w+\.png\)$", text, re.MULTILINE)) == 10
    for code in blocks("")[1:11]:
        assert len([line for line in code.splitlines() if line]) <= 10, code


def test_classes_are_those_of_the_table(page):
    module, _ = page
    masks = "window", "prefix", "sinks", "own", "neighborhood", "strided", "blocks", "tree"
    found = {name: shape(tw.Mask.of(getattr(module, name)).text).name for name in masks}
    assert found == {name: "A" if name in ("window", "prefix") else "B" for name in masks}
    others = {"A": lambda b, h, i, j: i // 64 == j // 64, "C": lambda b, h, i, j: ((i ^ j) & 1) == 0}
    assert {shape(tw.Mask.of(fn).text).name for fn in others.values()} == set(others)


def test_every_mod_gives_what_dense_gives(page):
    """The page's functions, as dense masks."""
    module, _ = page
    for name in ("sinks", "own", "prefix", "neighborhood", "strided", "blocks"):
        fn = getattr(module, name)
        q, k, v = (x.detach()[:, :512] for x in (module.q, module.k, module.v))
        dense = tw.Dense(tw.Mask.of(fn).dense(512, 512, 1, module.H))
        difference = tw.attention(q, k, v, mask=fn) - tw.attention(q, k, v, mask=dense)
        assert difference.abs().max() < 2e-6, name
