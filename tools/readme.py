"""Fills in the numbers of README.md and README.zh-CN.md from benchmarks/results.

Every number stands between two comments that name it, <!-- name --> and <!-- /name -->; `numbers` says what each is.
"""

from pathlib import Path
from typing import Any

import independent

from studies.accuracy import measure as study
from studies.accuracy.page import findings_of
from studies.bench import state
from studies.bench.results import OURS, RESULTS, file_of, load, repeated, rows_of
from studies.bench.suites import BACKWARD, FORWARD
from studies.bench.tables import CUDNN, EFFICIENT, STANDARD, geometric_mean, length_label, markdown, ratios
from studies.pages import field
from studies.pages.marked import filled
from studies.pages.report import ACCURACY, Origin, kernels_of_run

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
STAMPS = {
    "of-paper": ("fastest-forward", "fastest-backward", "fastest-shapes", "fastest-lowest", "chart", "chart-lengths"),
    "of-llmc": ("bf16x6-forward",),
    "of-errors": ("bf16x6-error",),
    "of-classic": ("less-memory", "less-memory-at"),
    "of-host": ("host", "host-sdpa"),
    "of-cpu": ("cpu-fp32", "cpu-bf16"),
    "of-amx": ("cpu-amx",),
    "of-serve": ("decode-lowest",),
    "of-independent": (
        "independent-forward", "independent-backward", "independent-shapes",
        "independent-forward-lowest", "independent-backward-lowest", "step-gpt2", "step-llama",
    ),
    "of-first": ("first-empty", "first-full"),
}  # fmt: skip
"""What says the version and the date of which numbers, on the line of each; empty where their kernels are shipped."""
GPU, CPU, AMX = independent.H200, "amd-epyc-2-threads", "intel-r-xeon-r-processor-1-threads"
DECODED = ("1 x 32k", "64 x 8k")
"""Sequences x keys of the README's shares of reading."""
STAMPED = (
    "Numbers whose kernels have changed since say their version, commit and date. The independent run "
    "([file](benchmarks/results/nvidia-h100-80gb-hbm3/independent.json)) gave each contender its own clock. "
    "[Performance](docs/results/performance.md) has more, and every table."
)
CHART_LENGTHS = (4096, 16384)
"""Of the bar chart: docs/pictures/bars.py."""
LONGEST = 4096
"""The length of the fp32 numbers."""


def write(results: Path = RESULTS, root: Path = ROOT) -> list[Path]:
    """Rewrites what stands between the comments."""
    found = numbers(results)
    pages = [root / name for name in PAGES]
    for page in pages:
        page.write_text(filled(page.read_text(), found))
    return pages


def numbers(results: Path) -> dict[str, str]:
    """By name, what the README says; its tables stand together."""
    found = measured(results)
    reference = (ROOT / "src" / "tilewise" / "attention" / "reference.py").read_text()
    tables = found["hopper"], _asked(results, found)
    found["numbers"] = "\n" + "\n\n".join((*tables, STAMPED)) + "\n"
    return found | {"reference-lines": str(len(reference.splitlines()))}


def measured(results: Path) -> dict[str, str]:
    """By name, what the README and the pages of results say: numbers, whole tables, and stamps."""
    gpu, cpu = loaded(results)
    stamped = stamps(results)
    found = _fp32(gpu, stamped) | _memory(gpu, stamped) | _host(gpu) | _cpu(cpu) | stamped
    found |= independent.grid(results) | independent.decoding(results) | independent.many_gpus(results)
    found |= _steps(results) | _first(results)
    found["cpu-amx"] = _cpu(load(file_of(results, AMX)))["cpu-bf16"]
    return found | _hopper(file_of(results, GPU), gpu, found)


def loaded(results: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of the GPU, and those of the CPU."""
    return load(file_of(results, GPU)), load(file_of(results, CPU))


def stamps(results: Path) -> dict[str, str]:
    """By name, version and date of numbers whose kernels are not those of today."""
    gpu, cpu = loaded(results)
    carried = state.carried(results)

    def of(content: dict[str, Any], *suites: str) -> str:
        runs = [content["suites"][name] for name in suites]
        found = [Origin(content, carried, kernels_of_run(content, name)).stamp(run["environment"])
                 for name, run in zip(suites, runs, strict=True)]  # fmt: skip
        return "".join(dict.fromkeys(found))

    def alone(device: str, name: str, *kernels: str) -> str:
        content = independent.read(device, name, results)
        return Origin(content, carried, kernels).stamp(content["environment"])

    served = dict.fromkeys(alone(card, independent.SERVING, "hopper split keys") for card in independent.CARDS.values())
    return {
        "of-paper": of(gpu, "paper"),
        "of-llmc": of(gpu, "llmc"),
        "of-errors": Origin(gpu, carried, ACCURACY).stamp(gpu[study.PART]["length"]["environment"]),
        "of-classic": of(gpu, "classic"),
        "of-host": of(gpu, "host"),
        "of-cpu": of(cpu, "cpu"),
        "of-amx": of(load(file_of(results, AMX)), "cpu"),
        "of-serve": "".join(served),
        "of-independent": alone(independent.H100, independent.RUN, "hopper"),
        "of-first": alone(independent.H200, independent.FIRST, "hopper forward D128", "hopper backward D128"),
    }


def _steps(results: Path) -> dict[str, str]:
    """Speed of whole training steps over PyTorch's fastest attention."""
    (_, gpt2, of_gpt2), (_, llama, of_llama) = independent.steps(results)
    return {"step-gpt2": f"{of_gpt2 / gpt2:.2f}", "step-llama": f"{of_llama / llama:.2f}"}


def _first(results: Path) -> dict[str, str]:
    """Seconds of a first forward and backward."""
    return {f"first-{state}": f"{seconds:.1f}" for state, seconds in independent.first(results).items()}


def _asked(results: Path, stamped: dict[str, str]) -> str:
    """Return the table of what visitors ask: a step, decoding, the first call, fp32 and memory."""
    gpu, _ = loaded(results)
    times, peaks = _times(gpu), _peaks(gpu)
    longest = max(length for _, length in peaks)
    lines = [[title, f"{a:.1f}", f"{b:.1f}", "of-independent"] for title, a, b in independent.steps(results)]
    for label in DECODED:
        shares = [independent.shares(card, results)[label] for card in independent.CARDS]
        both = (", ".join(f"{100 * x:.0f}%" for x in of) for of in zip(*shares, strict=True))
        cards = ", ".join(independent.CARDS)
        lines.append([f"decoding, {label} keys: speed over only reading them, {cards}", *both, "of-serve"])
    cold, warm = independent.first(results).items()
    title = f"first forward and backward: {cold[0]} kernel cache, {warm[0]} one, s"
    lines.append([title, f"{cold[1]:.1f}, {warm[1]:.1f}", "-", "of-first"])
    both = (", ".join(f"{times[name, pass_]:.2f}" for pass_ in PASSES) for name in (f"{OURS} bf16x6", EFFICIENT))
    lines.append([f"fp32 forward, backward: GPT-2's heads, {length_label(LONGEST)} tokens, ms", *both, "of-llmc"])
    both = (f"{peaks[name, longest] / 1e6:.0f}" for name in (OURS, CUDNN))
    title = f"peak memory, forward and backward, fp16, {length_label(longest)} tokens, MB"
    lines.append([title, *both, "of-classic"])
    shown = [[*cells, stamped[name].strip(" ()") or "shipped kernels"] for *cells, name in lines]
    return markdown(["on an H100 or H200", "tilewise", "PyTorch's fastest", "measured"], shown)


def _hopper(file: Path, content: dict[str, Any], others: dict[str, str]) -> dict[str, str]:
    """Speeds in 16-bit types: over cuDNN, over the fastest of all, and of the Triton kernels."""
    rows = rows_of(content, "paper")
    runs, peers = repeated(file, content, "paper"), field.peers_of(file)
    if not runs or not peers:
        raise ValueError(f"{file} has no repeated run of the suite paper beside it, or no peers.json")
    best = field.ratios([rows_of(run, "paper") for run in runs], field.best_of(peers))
    field_of = {pass_: [x for line, cells in best.items() if line[2] == pass_ for x in cells] for pass_ in PASSES}

    def over(peer: str, ours: str) -> dict[str, list[float]]:
        at = ratios(rows, peer, lambda row: row.milliseconds, ours)
        return {pass_: [x for row, x in at.items() if row.pass_ == pass_] for pass_ in PASSES}

    cudnn, portable, flex = (over(*pair) for pair in ((CUDNN, OURS), (CUDNN, TRITON), ("flex", TRITON)))
    own = [f"{others[f'independent-{pass_}{suffix}']}x" for pass_ in PASSES for suffix in ("", "-lowest")]
    lines = [
        _line("**tilewise** over the fastest of cuDNN, FA2, FA3, FA4", field_of),
        [f"the same on an H100, of cuDNN and FA2, in an independent run{others['of-independent']}", *own],
        _line("**tilewise** over cuDNN", cudnn),
        _line("its Triton kernels over cuDNN", portable),
        _line("its Triton kernels over FlexAttention", flex),
    ]
    shapes, stamp = len(field_of[FORWARD]), others["of-paper"]
    head = f"speed on an H200, bf16, {shapes} shapes{stamp}"
    table = markdown([head, "forward", "lowest", "backward", "lowest"], lines)
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
    """A row of the table: for each pass the mean and the lowest."""
    cells = [f"{x:.2f}x" for pass_ in PASSES for x in (geometric_mean(of[pass_]), min(of[pass_]))]
    return [title, *cells]


def _times(content: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Milliseconds of GPT-2's attention in fp32, by implementation and pass."""
    return {
        (row.implementation, row.pass_): row.milliseconds
        for row in rows_of(content, "llmc")
        if row.of.length == LONGEST and row.of.head_size == 64 and row.milliseconds
    }


def _fp32(content: dict[str, Any], stamped: dict[str, str]) -> dict[str, str]:
    """Times of GPT-2's attention in fp32, and errors over those of standard attention."""
    times = _times(content)
    errors = _errors(content)
    lines = [
        [title, *(f"{times[name, pass_]:.2f}" for pass_ in PASSES), f"{errors[name]:.2f}"]
        for name, title in FP32.items()
    ]
    where = f"fp32 on an H200: GPT-2's heads, {length_label(LONGEST)} tokens, causal{stamped['of-llmc']}"
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


def _peaks(content: dict[str, Any]) -> dict[tuple[str, int], int]:
    """Bytes of a forward and a backward above the inputs, by implementation and length."""
    rows = [
        row for row in rows_of(content, "classic") if row.peak_bytes and row.of.length >= 1024 and not row.of.causal
    ]
    return {(row.implementation, row.of.length): row.peak_bytes or 0 for row in rows}


def _memory(content: dict[str, Any], stamped: dict[str, str]) -> dict[str, str]:
    """Peak memory of a forward and a backward, above the inputs."""
    at = _peaks(content)
    lengths = sorted({length for _, length in at})
    lines = [[title, *(f"{at[name, n] / 1e6:.0f}" for n in lengths)] for name, title in MEMORY.items()]
    where = f"peak memory on an H200, MB: fp16, batch 8, 12 heads of 64, both passes{stamped['of-classic']}"
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
