"""What the site adds to MkDocs.

On GitHub, a document may link to every file of the repository. In the site such a file has a page, too: a Markdown file
is one, a Python file is shown, a folder is listed, and anything else is copied. Formulas become MathML, which browsers
draw by themselves.
"""

import ast
import html
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from math_core import LatexError, LatexToMathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"""(?:(?<=\]\()|(?<= src=")|(?<= srcset="))(?![\w+]+:)([^)"\s#]+)""")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
CHINESE = re.compile(r"^learn/zh/|\.zh-CN\.")
"""What the addresses of Chinese pages have."""
SOURCE = "---\nhide: [navigation, toc]\nsearch: { exclude: true }\n---\n"

places: dict[str, Path] = {}
"""What each page shows that is no Markdown file of docs/."""
log = logging.getLogger("mkdocs.hooks.site")
mathml = LatexToMathML(fancy_error=False)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to, and what those pages link to."""
    pages = list(files.documentation_pages())
    for page in pages:
        for target in links(page):
            if uri_of(target) not in files.src_uris:
                files.append(shown(target, config))
                pages.append(files.src_uris[uri_of(target)])
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Points links at the pages that show their targets; lets folded parts hold Markdown, as on GitHub."""
    if is_source(page.file):
        return markdown
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    here = posixpath.dirname(page.file.src_uri)

    def to_page(link: re.Match[str]) -> str:
        target = resolved(page.file, link[0])
        return posixpath.relpath(uri_of(target), here) if target else link[0]

    return LINK.sub(to_page, markdown).replace("<details>", "<details markdown>")


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Draws formulas; says which pages are Chinese."""

    def drawn(formula: re.Match[str]) -> str:
        try:
            drawing = mathml.convert_with_local_state(
                html.unescape(formula[2]).strip(), displaystyle=formula[1] == "div"
            )
            return f'<{formula[1]} class="formula">{drawing}</{formula[1]}>'
        except LatexError as error:
            log.warning("%s: %s in the formula %s", page.file.src_uri, error, formula[2])
            return formula[0]

    content = FORMULA.sub(drawn, content)
    return f'<div lang="zh">{content}</div>' if CHINESE.search(page.file.src_uri) else content


def links(page: File) -> Iterator[Path]:
    """The files and folders of the repository that a page links to."""
    if page.is_documentation_page() and not is_source(page):
        for link in LINK.findall(page.content_string):
            if target := resolved(page, link):
                yield target


def resolved(page: File, link: str) -> Path | None:
    """The file or folder of the repository that a link on a page leads to; None if there is none."""
    place = places.get(page.src_uri, DOCS / page.src_uri)
    target = ((place if place.is_dir() else place.parent) / link).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def uri_of(target: Path) -> str:
    """Where the page of a file or folder lies, as if in docs/."""
    if target.parent == ROOT and target.name.startswith("README."):
        return target.name.replace("README", "overview")  # docs/index.md is the home
    if target.is_dir():
        return uri_of(target / ("README.md" if (target / "README.md").exists() else "index.md"))
    path = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()
    return f"{path}.md" if target.suffix == ".py" else path


def is_source(page: File) -> bool:
    """Whether a page shows source code, in which nothing is a link."""
    return page.src_uri.endswith(".py.md")


def shown(target: Path, config: MkDocsConfig) -> File:
    """The page of a file or folder that MkDocs does not find by itself."""
    readme = target / "README.md"
    places[uri_of(target)] = target
    if target.is_dir() and not readme.exists():
        content = f"{SOURCE}# {name(target)}\n\n{listing(target)}"
    elif target.suffix == ".py":
        content = f"{SOURCE}# {name(target)}\n\n`````python linenums='1'\n{target.read_text()}\n`````\n"
    else:
        return File.generated(config, uri_of(target), abs_src_path=str(readme if target.is_dir() else target))
    return File.generated(config, uri_of(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def listing(folder: Path) -> str:
    """A table of a folder's files and folders, with the first line of what each says of itself.

    It links to each, but for tests: they would be a third of the site.
    """
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__pycache__")))
    link = "`{0}`" if folder.is_relative_to(ROOT / "tests") else "[`{0}`]({0})"
    rows = [f"| {link.format(path.name + '/' * path.is_dir())} | {summary(path)} |" for path in inside]
    return "\n".join(["| file | what it is |", "|---|---|", *rows, ""])


def summary(path: Path) -> str:
    """The first line of a module's or package's docstring; empty for anything else."""
    module = path / "__init__.py" if path.is_dir() else path
    if module.suffix != ".py" or not module.exists():
        return ""
    return (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n")[0].replace("|", "\\|")


def name(path: Path) -> str:
    """A path as the repository has it."""
    return f"`{path.relative_to(ROOT).as_posix()}`"
