"""Write the demo's page: one HTML file with its pictures inside."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..bench.suites import Suite
from ..training.comparison import NAMES, Comparison

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 3rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.9rem; margin-bottom: 0.2rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; }
p.lead { color: #666; margin-top: 0; } img { max-width: 100%; } figure { margin: 1rem 0; } .wide { overflow-x: auto; }
figcaption { color: #666; font-size: 0.9rem; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.3rem 1.1rem 0.3rem 0; text-align: right; border-bottom: 1px solid #e6e6e6; }
td + td { white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
th { color: #666; font-weight: 500; } .good { color: #2b7a3d; } .bad { color: #b3261e; font-weight: 600; }
@media (max-width: 40rem) { /* a phone scrolls pictures, as smaller ones could not be read */
  body { margin: 1.5rem auto; } img { max-width: none; width: 44rem; } ul { padding-left: 1.2rem; }
  table { font-size: 0.85rem; } th, td { padding-right: 0.7rem; }
}
"""
HEAD = (
    "<!doctype html><html lang='en'><meta charset='utf-8'>"
    f"<meta name='viewport' content='width=device-width, initial-scale=1'><title>tilewise</title><style>{STYLE}</style>"
)
Benchmark = tuple[Suite, list[str], list[tuple[Path, str]]]


def write_page(path: Path, c: Comparison, benchmark: Benchmark, picture: Path, env: dict[str, Any]) -> None:
    """Write the page; `benchmark` is the suite, its headlines, and its pictures with what they show."""
    suite, found, pictures = benchmark
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    s = c.settings
    model = (
        f"{s.layers} layers, {s.heads} heads, width {s.width}, {s.context} bytes of context, batch {s.batch}, "
        f"{s.steps} steps in fp32, reading the source of the Python standard library"
    )
    rows = [
        (f"{name} attention" if name == "standard" else name, f"{c.losses[name][0]:.4f}", f"{c.losses[name][-1]:.4f}",
         f"{c.time_s[name]:.1f} s", f"{c.peak_bytes[name] / 1e6:.0f} MB")
        for name in NAMES
    ]  # fmt: skip
    body = [
        "<h1>tilewise</h1>",
        f"<p class='lead'>Exact attention in linear memory, on {escape(env['device'])}.</p>",
        "<h2>One GPT, trained twice from one seed</h2>",
        f"<p>{escape(model)}. Back end: <b>{escape(c.backend)}</b>.</p>",
        f"<p class='{'good' if c.equal else 'bad'}'>{escape(c.verdict())}</p>",
        _table(("", "first loss", "last loss", "time", "peak memory"), rows),
        _figure(
            picture, "Losses overlaid, their difference, time, and memory above what was there before the first step"
        ),
        f"<h2>Benchmark: {escape(suite.title)}</h2>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in found) + "</ul>",
        *(_figure(file, shows) for file, shows in pictures),
        "<h2>Where this comes from</h2>",
        f"<p>{escape(env['when'])}; {escape(versions)}; commit {escape(env['commit'] or 'unknown')}. "
        "All numbers are in <code>summary.json</code>, in the folder of this page.</p>",
    ]
    path.write_text(HEAD + "\n".join(body) + "</html>\n")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<div class='wide'><table>" + "".join(lines) + "</table></div>"


def _figure(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    text = escape(caption)
    image = f"<img alt='{text}' src='data:image/png;base64,{data}'>"
    return f"<figure><div class='wide'>{image}</div><figcaption>{text}</figcaption></figure>"
