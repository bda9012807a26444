"""Fills in the numbers of README.md and README.zh-CN.md from benchmarks/results.

Every number stands between two comments that name it, <!-- name --> and <!-- /name -->; `numbers` says what each is.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from studies.accuracy import measure as study
from studies.accuracy.page import findings_of
from studies.bench.results import OURS, load, repeated, rows_of
from studies.bench.suites import BACKWARD, FORWARD
from studies.bench.tables import CUDNN, EFFICIENT, STANDARD, geometric_mean, length_label, markdown, ratios
from studies.pages import field
from studies.pages.marked import filled

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "README.zh-CN.md")
PASSES = (FORWARD, BACKWARD)
TRITON = f"{OURS} triton"
FP32 = {
    EFFICIENT: "PyTorch, memory-efficient",
    f"{OURS} bf16x6": "**`bf16x6`**, the default",
    f"{OURS} fp16x3": "**`fp16x3`**",
}
"""Rows of the table of fp32."""
MEMORY = {STANDARD: "standard attention", CUDNN: "SDPA (cuDNN)", OURS: "**tilewise**"}
"""Rows of the table of memory."""
TABLES = ("hopper", "fp32", "memory")
CHART_LENGTHS = (4096, 16384)
"""Of the bar chart: docs/pictures/bars.py."""
LONGEST = 4096
"""The length of the fp32 numbers."""


def write(results: Path = ROOT / "benchmarks" / "results", root: Path = ROOT) -> list[Path]:
    """Rewrites what stands between the comments."""
    found = numbers(results)
    pages = [root / name for name in PAGES]
    for page in pages:
        page.write_text(filled(page.read_text(), found))
    return pages


def numbers(results: Path) -> dict[str, str]:
    """By name, what the README says; its tables stand together."""
    gpu, cpu = loaded(results)
    found = measured(results)
    tables = [found.pop(name) for name in TABLES]
    reference = (ROOT / "src" / "tilewise" / "reference.py").read_text()
    found["numbers"] = "\n" + "\n\n".join([*tables, _measured(gpu, cpu)]) + "\n"
    return found | {"reference-lines": str(len(reference.splitlines()))}


def measured(results: Path) -> dict[str, str]:
    """By name, what the README and the pages of results say: numbers, and whole tables."""
    gpu, cpu = loaded(results)
    return _hopper(results / "nvidia-h200.json", gpu) | _fp32(gpu) | _memory(gpu) | _host(gpu) | _cpu(cpu)


def loaded(results: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of the GPU, and those of the CPU."""
    return load(results / "nvidia-h200.json"), load(results / "amd-epyc-2-threads.json")


def _hopper(file: Path, content: dict[str, Any]) -> dict[str, str]:
    """Speeds in 16-bit types: over cuDNN, over the fastest of all, and of the Triton kernels."""
    rows = rows_of(content, "paper")
    runs, peers = repeated(file, content, "paper"), field.peers_of(file)
    if not runs or not peers:
        raise ValueError(f"{file.name} has no repeated run of the suite paper, or peers/{file.name} is missing")
    best = field.ratios([rows_of(run, "paper") for run in runs], field.best_of(peers))
    field_of = {pass_: [x for line, cells in best.items() if line[2] == pass_ for x in cells] for pass_ in PASSES}

    def over(peer: str, ours: str) -> dict[str, list[float]]:
        at = ratios(rows, peer, lambda row: row.milliseconds, ours)
        return {pass_: [x for row, x in at.items() if row.pass_ == pass_] for pass_ in PASSES}

    cudnn, portable, flex = (over(*pair) for pair in ((CUDNN, OURS), (CUDNN, TRITON), ("flex", TRITON)))
    lines = [
        _line("**tilewise** over the fastest of cuDNN, FA2, FA3, FA4", field_of),
        _line("**tilewise** over cuDNN", cudnn),
        _line("its Triton kernels over cuDNN", portable),
        _line("its Triton kernels over FlexAttention", flex),
    ]
    table = markdown(["speed on an H200, bf16", "shapes", "forward", "lowest", "backward", "lowest"], lines)
    return {
        "hopper": table,
        "fastest-forward": f"{geometric_mean(field_of[FORWARD]):.2f}",
        "fastest-backward": f"{geometric_mean(field_of[BACKWARD]):.2f}",
        "fastest-shapes": str(len(field_of[FORWARD])),
        "fastest-lowest": f"{min(map(min, field_of.values())):.2f}",
        "chart": _chart(peers),
        "chart-lengths": "、".join(map(length_label, CHART_LENGTHS)),
    }


def _chart(peers: dict[str, Any]) -> str:
    """What the bars are, and which are missing."""
    lacking = {
        pass_: {row["D"] for row in peers["rows"] if row["N"] in CHART_LENGTHS and f"fa3{suffix}" not in row}
        for pass_, suffix in field.SUFFIXES.items()
    }
    missing = " and no ".join(
        f"{pass_} bar at head size {' and '.join(map(str, sorted(sizes)))}" for pass_, sizes in lacking.items()
    )
    lengths = " and ".join(map(length_label, CHART_LENGTHS))
    return (
        f"one H200, bf16, geometric mean over {lengths} tokens with and without a causal mask. "
        f"FA3 has no {missing}: its run lacks them."
    )


def _line(title: str, of: dict[str, list[float]]) -> list[str]:
    """A row of the table: how many shapes, and for each pass the mean and the lowest."""
    cells = [f"{x:.2f}x" for pass_ in PASSES for x in (geometric_mean(of[pass_]), min(of[pass_]))]
    return [title, str(len(of[FORWARD])), *cells]


def _fp32(content: dict[str, Any]) -> dict[str, str]:
    """Times of GPT-2's attention in fp32, and errors over those of standard attention."""
    times = {
        (row.implementation, row.pass_): row.milliseconds
        for row in rows_of(content, "llmc")
        if row.of.length == LONGEST and row.of.head_size == 64 and row.milliseconds
    }
    errors = _errors(content)
    lines = [
        [title, *(f"{times[name, pass_]:.2f}" for pass_ in PASSES), f"{errors[name]:.2f}"]
        for name, title in FP32.items()
    ]
    where = f"fp32 on an H200: GPT-2's heads, {length_label(LONGEST)} tokens, causal"
    table = markdown([where, "forward, ms", "backward, ms", "error / standard attention's"], lines)
    faster = times[EFFICIENT, FORWARD] / times[f"{OURS} bf16x6", FORWARD]
    error = errors[f"{OURS} bf16x6"] / errors[EFFICIENT]
    return {"fp32": table, "bf16x6-forward": f"{faster:.1f}", "bf16x6-error": f"{error:.2f}"}


def _errors(content: dict[str, Any]) -> dict[str, float]:
    """Of each implementation's o, over standard attention's: geometric means of all lengths."""
    at: dict[str, dict[Any, float]] = {}
    for finding in findings_of({study.PART: content[study.PART]}, "length"):
        if finding.relative:
            at.setdefault(finding.implementation, {})[finding.at] = finding.relative["o"]
    return {name: geometric_mean(x / at[STANDARD][point] for point, x in of.items()) for name, of in at.items()}


def _memory(content: dict[str, Any]) -> dict[str, str]:
    """Peak memory of a forward and a backward, above the inputs."""
    rows = [
        row for row in rows_of(content, "classic") if row.peak_bytes and row.of.length >= 1024 and not row.of.causal
    ]
    at = {(row.implementation, row.of.length): row.peak_bytes or 0 for row in rows}
    lengths = sorted({length for _, length in at})
    lines = [[title, *(f"{at[name, n] / 1e6:.0f}" for n in lengths)] for name, title in MEMORY.items()]
    where = "peak memory on an H200, MB: fp16, batch 8, 12 heads of 64, both passes"
    less = at[STANDARD, max(lengths)] / at[OURS, max(lengths)]
    table = markdown([where, *map(length_label, lengths)], lines)
    return {"memory": table, "less-memory": f"{less:.0f}", "less-memory-at": length_label(max(lengths))}


def _host(content: dict[str, Any]) -> dict[str, str]:
    """CPU time of a forward call in inference."""
    rows = [row for row in rows_of(content, "host") if row.pass_ == FORWARD and row.host_microseconds_no_grad]
    at = {row.implementation: row.host_microseconds_no_grad or 0.0 for row in rows}
    return {"host": f"{at[OURS]:.0f}", "host-sdpa": f"{at['sdpa']:.0f}"}


def _cpu(content: dict[str, Any]) -> dict[str, str]:
    """Speed over SDPA on a CPU, forward."""
    rows = [row for row in rows_of(content, "cpu") if row.pass_ == FORWARD]
    found = ratios(rows, "sdpa", lambda row: row.milliseconds)
    return {
        f"cpu-{dtype}": f"{geometric_mean(x for row, x in found.items() if row.of.dtype == dtype):.2f}"
        for dtype in ("fp32", "bf16")
    }


def _measured(gpu: dict[str, Any], cpu: dict[str, Any]) -> str:
    """Where the numbers come from."""
    commits = [_commits(gpu, [gpu["suites"][name] for name in ("paper", "classic", "llmc", "host")])]
    commits += [_commits(gpu, [gpu[study.PART]["length"]]), _commits(cpu, [cpu["suites"]["cpu"]])]
    return (
        f"Measured on an H200 at commit {commits[0]} (errors: {commits[1]}), and on the CPU at {commits[2]}. "
        "[Performance](docs/results/performance.md) has every table, and marks the rows whose kernels changed since."
    )


def _commits(content: dict[str, Any], runs: Iterable[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(f"`{run['environment']['commit'][:7]}`" for run in runs))
