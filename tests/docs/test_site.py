"""The documentation site: built without a warning and in time, complete, and asking nothing of anyone."""

import html
import inspect
import os
import re
import resource
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

import tilewise as tw

for package in (
    "mkdocs",
    "material",
    "mkdocs_awesome_nav",
    "mkdocs_redirects",
    "mkdocstrings_handlers.python",
    "math_core",
):
    pytest.importorskip(package, reason=f"{package} is not installed, or Python is older than 3.11")

ROOT = Path(__file__).parents[2]
SECONDS = 120
NOWHERE = "http://127.0.0.1:9"
"""Where a build that asks the network would ask."""
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
MOVED = {
    "use": ("guide", "support", "numerics"),
    "results": ("performance", "fp32", "accuracy", "accumulation"),
    "internals": ("architecture", *(f"adr/{path.stem}" for path in ROOT.glob("docs/internals/adr/000*.md"))),
}
"""Pages that lay in docs/ itself."""
SETS = {"source": "srcset", "img": "srcset"}
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
ENTRY = re.compile(r"^(\w+, )*\w+: ")
"""What docstrings put before an argument's or an error's description."""
TEXT = re.compile(r"^\s*([-*+] |\d+\. |\||```|\$\$)", re.MULTILINE)
"""How lists, tables, code and formulas begin, in Markdown."""
HEADERS = ("Args:", "Returns:", "Raises:", "")
FORMULAS = r"""
Inline $O_i = \sum_j P_{ij} V_j$, and a block:

$$
\ell = \frac{a}{b}
$$

```math
\alpha = e^{m - m'}
```
"""
CHINESE = "# 注意力\n\n[在线](#在线)\n\n## 在线\n"
MISTAKES = ("nowhere.md", "guide.md#nowhere", "../../src/nothing.py", r"$\mistake$")


def build(root, out):
    """Builds the site, strictly and without a network."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


class Reader(HTMLParser):
    """A page's anchors, links, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loads = {""}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and found.get(LOADED[tag]):
            self.loads.append(found[LOADED[tag]])
        if tag in SETS and found.get(SETS[tag]):
            self.loads.append(found[SETS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = build(ROOT, out)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime - before.ru_utime  # of the processor: the machine may be busy with other tests
    assert done.returncode == 0, done.stdout
    pages = {path: Reader(path.read_text()) for path in sorted(out.rglob("*.html"))}
    return SimpleNamespace(out=out, log=done.stdout, seconds=took, pages=pages)


def test_it_builds_in_time_without_a_warning(site):
    assert "WARNING" not in site.log
    assert site.seconds < SECONDS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_document_is_a_page_that_the_navigation_names(site, document):
    home = (site.out / "index.html").read_text()
    (navigation,) = re.findall(r'<nav class="md-nav md-nav--primary.*?</nav>\s*</div>', home, re.DOTALL)
    assert (site.out / page_of(document)).exists()
    assert f'href="{page_of(document)}"' in navigation


def page_of(document):
    if document.parent == ROOT and document.name.startswith("README."):
        return f"{document.stem.replace('README', 'overview')}.html"
    path = document.relative_to(ROOT / "docs" if document.is_relative_to(ROOT / "docs") else ROOT)
    return path.with_name(path.name.replace("README", "index")).with_suffix(".html").as_posix()


def test_links_lead_somewhere(site):
    read = 0
    for path, page in site.pages.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name}: {link}"
            if target in site.pages and "learn/watch" not in target.as_posix():
                assert unquote(parts.fragment) in site.pages[target].anchors, f"{path.name}: {link}"
            read += 1
    assert read > 1000


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder, names in MOVED.items() for name in names])
def test_old_addresses_lead_to_the_new_ones(site, folder, name):
    old = (site.out / f"{name}.html").read_text()
    (new,) = re.findall(r'http-equiv="refresh" content="0; url=([^"]+)"', old)
    assert ((site.out / f"{name}.html").parent / new).resolve() == (site.out / folder / f"{name}.html").resolve()
    assert "window.location.hash" in old, "anchors are lost"


def test_hopper_is_three_pages_now(site):
    assert "internals/hopper-forward.html" in (site.out / "hopper.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = [url for page in site.pages.values() for url in page.loads]
    assert loaded
    assert [url for url in loaded if re.match(r"(\w+:)?//", url)] == []
    for sheet in site.out.rglob("*.css"):
        assert not re.search(r"""(url\(|@import\s*)["']?\s*(https?:)?//""", sheet.read_text()), sheet


@pytest.mark.parametrize("name", tw.__all__)
def test_the_reference_holds_every_docstring(site, name):
    page = site.out / "api" / "tilewise.html"
    assert any(anchor.endswith(f".{name}") for anchor in site.pages[page].anchors)
    shown = plain(html.unescape(re.sub(r"<[^>]*>", "", page.read_text())))
    for line in inspect.getdoc(getattr(tw, name)).splitlines():
        if line.strip() not in HEADERS:
            assert plain(ENTRY.sub("", line.strip())) in shown, line


@pytest.mark.parametrize("name", ["attention", "attention_qkvpacked", "explain"])
def test_the_reference_shows_every_option_in_the_signature(site, name):
    page = (site.out / "api" / "tilewise.html").read_text()
    (code,) = re.findall(rf'id="tilewise\.(?:\w+\.)*{name}".*?<code>(.*?)</code>', page, re.DOTALL)[:1]
    shown = re.sub(r"<[^>]*>", "", code)
    assert shown.startswith(f"{name}(")
    for option in inspect.signature(getattr(tw, name)).parameters:
        assert re.search(rf"\b{option}: ", shown), option


def plain(text):
    """Text without marks of code and without line breaks."""
    return " ".join(text.replace("`", "").split())


def test_source_is_shown_as_it_is(site):
    shown = (site.out / "src/tilewise/attention/reference.py.html").read_text()
    (code,) = re.findall(r'<td class="code">.*?<code>(.*?)</code>', shown, re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "", code))
    assert text.strip() == (ROOT / "src/tilewise/attention/reference.py").read_text().strip()


def test_no_list_or_table_is_left_as_text(site):
    """Which happens to Markdown that GitHub reads in another way: a list without an empty line above, for example."""
    for path in site.pages:
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(), re.DOTALL):
            assert not re.search(r"^\s*([-*+] |\d+\. |\||```|\$\$)", paragraph, re.MULTILINE), (
                f"{path.name}: {paragraph}"
            )


def test_formulas_are_drawn_and_mistakes_stop_a_build(tmp_path):
    root = tmp_path / "root"
    shutil.copytree(ROOT / "docs/site", root / "docs/site")
    (root / "mkdocs.yml").write_text(f"INHERIT: {ROOT}/mkdocs.yml\nplugins: [search, offline]\n")
    mistakes = [text if text.startswith("$") else f"[wrong]({text})" for text in MISTAKES]
    for name, text in (("index", "# Home"), ("use/guide", "# Guide"), ("learn/zh/9-chinese", CHINESE),
                       ("use/numerics", "\n\n".join(["# Numerics", FORMULAS, *mistakes]))):  # fmt: skip
        page = root / f"docs/{name}.md"
        page.parent.mkdir(exist_ok=True, parents=True)
        page.write_text(text)
    done = build(root, tmp_path / "out")
    assert done.returncode != 0
    for mistake in MISTAKES:
        assert mistake.strip("$") in done.stdout
    assert f"Aborted with {len(MISTAKES)} warnings" in done.stdout
    drawn = (tmp_path / "out/use/numerics.html").read_text()
    assert "<msub><mi>O</mi><mi>i</mi></msub>" in drawn
    assert drawn.count('<math display="block">') == 2
    assert '<div lang="zh"><h1' in (tmp_path / "out/learn/zh/9-chinese.html").read_text()


def test_search_works_from_a_disk(site, browse):
    page = browse((site.out / "index.html").as_uri())
    page.fill(".md-search__input", "qkvpacked")
    page.click('.md-search-result__link[href*="#tilewise.attention_qkvpacked"]')
    page.wait_for_selector("[id='tilewise.attention_qkvpacked']")
    assert "api/tilewise.html" in page.url


WATCH = ("learn/watch/index.html", "learn/watch/index.html?lang=zh")
TOO_WIDE = """() => {
  const scrolls = (e) => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll("main *, article *, #transport *")]
    .filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
    .map((e) => e.outerHTML.slice(0, 200));
}"""


@pytest.mark.parametrize("width", [1366, 390])
def test_nothing_is_cut_off(site, browse, width):
    """What is wider than the page scrolls in its own box."""
    page = browse((site.out / "index.html").as_uri(), viewport={"width": width, "height": 850})
    for address in (*map(page_of, DOCUMENTS), *WATCH):
        page.goto(f"{site.out.as_uri()}/{address}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        assert page.evaluate(TOO_WIDE) == [], address


PHONE = {"width": 390, "height": 844}
WIDE = """() => {
  document.querySelectorAll("details").forEach((folded) => folded.open = true);
  return [...document.querySelectorAll("article table")]
    .filter((table) => table.getBoundingClientRect().right > innerWidth)
    .map((table) => table.innerText.slice(0, 200));
}"""
OPENING = """() => {
  const [title, first] = document.querySelector("article").querySelectorAll(":scope > h1, :scope > h1 ~ *");
  return [title.tagName, first.tagName, first.querySelectorAll("li strong").length, first.getBoundingClientRect().top];
}"""


@pytest.mark.parametrize("name", ["performance", "tables", "eight-bits"])
def test_no_table_is_wider_than_a_phone(site, browse, name):
    page = browse((site.out / "results" / f"{name}.html").as_uri(), viewport=PHONE)
    assert page.evaluate("document.querySelectorAll('article table').length") >= 3
    assert page.evaluate(WIDE) == []


def test_performance_begins_with_its_summary(site, browse):
    page = browse((site.out / "results" / "performance.html").as_uri(), viewport=PHONE)
    title, first, answers, top = page.evaluate(OPENING)
    assert (title, first) == ("H1", "UL")
    assert answers >= 8
    assert top < PHONE["height"] / 3
