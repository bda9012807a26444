"""Fill in the first screens of docs/results: their text is written by hand, their numbers by `measured`."""

from pathlib import Path
from typing import Any

import independent
import readme

from studies.accumulation import measure as accumulation
from studies.accumulation.page import CHANGES
from studies.accumulation.plots import ratios_of
from studies.accumulation.speed import Time
from studies.accuracy import measure as accuracy
from studies.accuracy.page import findings_of
from studies.bench import state
from studies.bench.accuracy import NAMES
from studies.bench.results import OURS, RESULTS, file_of, load
from studies.bench.tables import EFFICIENT, STANDARD, geometric_mean, is_ours, markdown
from studies.pages.fp32 import WAYS_TABLE
from studies.pages.marked import write as fill
from studies.pages.report import Origin
from studies.training.contests import Trial, name_of

ROOT = readme.ROOT
PAGES = ("performance", "fp32", "accuracy", "accumulation")
MORE = ("results/eight-bits", "use/many-gpus", "use/faq", "use/support")
"""Other pages with numbers and sentences that they share."""
MODEL = {"batch": 4, "context": 4096, "matmul": "highest"}
"""The training whose steps fp32.md quotes."""
LENGTHS = (1024, 65536)
"""Keys at which accumulation.md quotes errors."""


def write(results: Path = RESULTS, docs: Path = ROOT / "docs") -> list[Path]:
    """Rewrite what stands between the comments."""
    found = numbers(results)
    return [fill(docs / f"{name}.md", found) for name in (*(f"results/{name}" for name in PAGES), *MORE)]


def numbers(results: Path) -> dict[str, str]:
    """Return by name what the pages say."""
    gpu, _ = readme.loaded(results)
    found = readme.measured(results) | _training(gpu) | _accuracy(gpu) | _accumulation(gpu) | _beside(results)
    return {name: f"\n\n{text}\n\n" if "\n" in text else text for name, text in (found | {"ways": WAYS_TABLE}).items()}


def _beside(results: Path) -> dict[str, str]:
    """Return the tables of other files than bench.json."""
    found = {"independent-grid": independent.grid_table(results), "slower": independent.slower_table(results)}
    for card, device in independent.CARDS.items():
        content = load(file_of(results, device, "card.json"))
        of = Origin(content, state.carried(results), ("hopper 8-bit forward", "hopper forward", "quantize"))
        found[f"of-eight-bits-{card.lower()}"] = of.stamp(content["suites"]["eight-bits"]["environment"])
    content = independent.read(independent.H200, independent.MODELS, results)
    of_models = Origin(content, state.carried(results), ("hopper forward", "hopper backward", "triton single"))
    found["models"] = independent.models_table(of_models.stamp(content["environment"]), results)
    found |= {"decoding": independent.shares_table(results), "four-gpus": independent.four_table(results)}
    return found | independent.eight_bits_tables(results)


def _training(content: dict[str, Any]) -> dict[str, str]:
    """How much faster a whole step of GPT-2 is than with standard attention."""
    rows = content["training"][name_of(MODEL, "GPT-2 124M")]["rows"]
    steps = {trial.attention: trial.step_s for trial in (Trial(**row) for row in rows)}
    names = {"step-bf16x6": f"{OURS} bf16x6", "step-fp16x3": f"{OURS} fp16x3", "step-efficient": EFFICIENT}
    return {name: f"{steps[STANDARD] / steps[attention]:.2f}" for name, attention in names.items()}


def _accuracy(content: dict[str, Any]) -> dict[str, str]:
    """Errors over standard attention's, in the geometric mean of all points."""
    at: dict[str, dict[Any, dict[str, float]]] = {}
    for sweep in content[accuracy.PART]:
        for finding in findings_of(content, sweep):
            if finding.relative:
                at.setdefault(finding.implementation, {})[finding.at] = finding.relative
    standard = at.pop(STANDARD)
    lines = []
    for name, of in at.items():
        means = [
            geometric_mean(error[tensor] / standard[point][tensor] for point, error in of.items()) for tensor in NAMES
        ]
        bold = "**" if is_ours(name) else ""
        lines.append([f"{bold}{name}{bold}", *(f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in means)])
    outputs = {line[0].strip("*"): line[1] for line in lines}
    table = markdown(["error over standard attention's, H200", *NAMES], lines)
    names = {"o-bf16x6": f"{OURS} bf16x6", "o-fp16x3": f"{OURS} fp16x3", "o-efficient": EFFICIENT}
    return {"errors": table} | {name: outputs[implementation] for name, implementation in names.items()}


def _accumulation(content: dict[str, Any]) -> dict[str, str]:
    """Times and errors over those of fp32 sums."""
    runs = content[accumulation.PART]
    times = [Time(**row) for row in runs["speed"]["rows"]]
    sizes = sorted({time.on.head_size for time in times})
    ratios = {size: ratios_of(times, size) for size in sizes}
    errors = {
        (finding.of, finding.at.length): finding.relative or 0.0
        for finding in (accumulation.Finding(**row) for row in runs["length"]["rows"])
    }
    lines = []
    for name, changed in CHANGES.items():
        speed = [f"{geometric_mean(ratios[size][str(changed)]):.2f}" for size in sizes]
        worse = [f"{errors[changed, n] / errors[accumulation.PLAIN, n]:.1f}" for n in LENGTHS]
        lines.append([name, *speed, *worse])
    head = ["in place of fp32 sums, H200", *(f"time, head size {size}" for size in sizes)]
    table = markdown([*head, *(f"error, {n >> 10}k keys" for n in LENGTHS)], lines)
    values = {f"values-{size}": line for size, line in zip(sizes, lines[1][1:], strict=False)}
    return {"sums": table, "values-error": lines[1][-1]} | values
