"""Numbers of benchmarks/results that lie in files of their own: an independent run, training steps of models, serving,
first calls, and 8 bits.

`readme.py` and `screens.py` put them between the pages' comments. A function returns them by name.
"""

import json
import math
from pathlib import Path
from typing import Any

from studies.bench.results import OURS, RESULTS, file_of, load, rows_of, unpacked
from studies.bench.tables import geometric_mean, length_label, markdown

H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
CARDS = {"H100": H100, "H200": H200}
"""Those with suites and serving, by the names that tables show."""
RUN, SERVING, FIRST, MODELS = "independent.json", "serving.json", "first-call.json", "models.json"
PASSES = {"fwd": "forward", "bwd": "backward"}
LESS = 1.0
"""Below it a peer is faster."""
STEPS = {
    "GPT-2 124M, 16 x 1024, compiled": "training step, GPT-2 124M, 16k tokens, ms",
    "Llama-8B layer, 1 x 8192, compiled": "training step, a layer of Llama 8B, 8k tokens, ms",
}
CACHES = {"1 sequences of 32768 keys": "1 x 32k", "8 sequences of 4096 keys": "8 x 4k",
          "32 sequences of 4096 keys": "32 x 4k", "128 sequences of 1024 keys": "128 x 1k",
          "8 sequences of 32768 keys": "8 x 32k", "64 sequences of 8192 keys": "64 x 8k"}  # fmt: skip
PRECISIONS = ("fp8", "int8")
SIZES = (64, 128, 256)
Ratios = dict[tuple[str, int, bool, int], dict[str, float]]
"""Speed over 16 bits: by precision, head size, causal or not, and tokens; in each measurement."""


def read(device: str, name: str, results: Path = RESULTS) -> dict[str, Any]:
    """Return a file of a device."""
    return json.loads(file_of(results, device, name).read_text())


def _run(results: Path) -> dict[str, Any]:
    return read(H100, RUN, results)


def grid(results: Path = RESULTS) -> dict[str, str]:
    """Speed over the fastest of cuDNN and FlashAttention-2 in the independent run."""
    rows = [row for row in _run(results)["rows"] if row["suite"] == "grid"]
    found = {"independent-shapes": str(sum(row["pass"] == "fwd" for row in rows))}
    for short, name in PASSES.items():
        mine = [row["ratio"] for row in rows if row["pass"] == short]
        found |= {
            f"independent-{name}": f"{geometric_mean(mine):.2f}",
            f"independent-{name}-lowest": f"{min(mine):.2f}",
        }
    return found


def grid_table(results: Path = RESULTS) -> str:
    """Return the grid by head size and mask: means and lowest ratios."""
    rows = [row for row in _run(results)["rows"] if row["suite"] == "grid"]
    groups: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        _, size, mask, _ = row["case"].split(" ")
        groups.setdefault(f"{size.removeprefix('D')} {mask}", {}).setdefault(row["pass"], []).append(row["ratio"])
    cells = {
        name: [x for of in PASSES for x in (geometric_mean(each[of]), min(each[of]))] for name, each in groups.items()
    }
    order = sorted(cells, key=lambda name: (int(name.split(" ")[0]), name.endswith("causal")))
    head = ["head size, mask", "forward", "lowest", "backward", "lowest"]
    return markdown(head, [[name, *(f"{x:.2f}" for x in cells[name])] for name in order])


def slower_table(results: Path = RESULTS) -> str:
    """Return every case of the independent run in which a peer was faster, slowest first."""
    rows = [row for row in _run(results)["rows"] if row["ratio"] < LESS]
    lines = [[row["case"], row["pass"], f"{row['ratio']:.2f}", _fastest(row)] for row in sorted(rows, key=_ratio)]
    return markdown(["case", "pass", "speed", "over"], lines)


def _ratio(row: dict[str, Any]) -> float:
    return row["ratio"]


def _fastest(row: dict[str, Any]) -> str:
    """Return the name of a row's fastest peer."""
    peers = {name: time for name, time in row["peers"].items() if not name.startswith(OURS) and name != "read"}
    return min(peers, key=lambda name: peers[name]).removesuffix("_c").replace("cudnn", "cuDNN")


def steps(results: Path = RESULTS) -> list[tuple[str, float, float]]:
    """Return each whole training step: what it is, tilewise's milliseconds, and those of PyTorch's fastest."""
    measured = _run(results)["training steps, milliseconds"]
    return [
        (title, measured[name][OURS], min(time for peer, time in measured[name].items() if peer != OURS))
        for name, title in STEPS.items()
    ]


def shares(card: str, results: Path = RESULTS) -> dict[str, tuple[float, float]]:
    """Return by caches the speed of one query over that of only reading them: tilewise's, and PyTorch's fastest."""
    rows, found = {row["what"]: row for row in read(CARDS[card], SERVING, results)["rows"]}, {}
    for name, label in CACHES.items():
        reading, beside = rows[f"{name}, share of reading"], rows[f"{name}, contiguous"]["microseconds"]
        theirs = min(t for peer, t in beside.items() if not (isinstance(t, str) or peer.startswith(OURS)))
        found[label] = reading["ratio"], reading["microseconds"]["reads"] / theirs
    return found


def shares_table(results: Path = RESULTS) -> str:
    """Return the shares of both cards."""
    cards = {card: shares(card, results) for card in CARDS}
    lines = [
        [label, *(f"{100 * share:.0f}%" for card in cards.values() for share in card[label])]
        for label in CACHES.values()
    ]
    head = [name for card in cards for name in (card, f"{card}: PyTorch")]
    return markdown(["sequences x keys", *head], lines)


def decoding(results: Path = RESULTS) -> dict[str, str]:
    """The lowest share of reading, of all cards and caches."""
    lowest = min(share for card in CARDS for share, _ in shares(card, results).values())
    return {"decode-lowest": f"{100 * lowest:.0f}"}


def models_table(stamp: str, results: Path = RESULTS) -> str:
    """Return the milliseconds of training steps, eager and compiled, beside those of PyTorch's fastest attention."""
    lines: dict[str, list[str]] = {}
    for row in unpacked(read(H200, MODELS, results))["rows"]:
        if row["ratio"] is not None:
            at, cells = row["milliseconds"], lines.setdefault(f"{row['model']}, {row['size']}", ["", "", "", ""])
            first = 2 * (row["mode"] == "compiled")
            cells[first : first + 2] = f"{at[OURS]:.1f}, {at[row['than']]:.1f}", f"{row['ratio']:.2f}"
    head = [f"a step on an H200, ms{stamp}", "eager: tilewise, PyTorch", "speed", "compiled: the same", "speed"]
    return markdown(head, [[name, *cells] for name, cells in lines.items()])


def first(results: Path = RESULTS) -> dict[str, float]:
    """Return the seconds of the first forward and backward of a process, by the state of Triton's cache."""
    content = read(H200, FIRST, results)
    commit = content["environment"]["commit"]
    return {
        state: sum([row["seconds"] for row in content[f"{commit}, {state} cache"] if row.get("length") == 2048])
        for state in ("empty", "full")
    }


NUMERALS = {2: ("two", "两"), 4: ("four", "四"), 8: ("eight", "八")}
"""Numbers of GPUs in words, English and Chinese: the README's prose has no digits of its own."""


def many_gpus(results: Path = RESULTS) -> dict[str, str]:
    """Return what has run on several GPUs, in one sentence for every page that says it."""
    content = _run(results)
    named = {count: name for name in content for count, (word, _) in NUMERALS.items() if name == f"{word} H100s"}
    over_nccl, most = content[named[2]], max(named)
    right, all_ = over_nccl["right"], over_nccl["combinations"]
    (english, chinese), (two, er) = NUMERALS[most], NUMERALS[2]
    return {
        "many-gpus": f"Context parallelism is tested on CPUs; {two} H100s ran {right} of {all_} combinations "
        f"of plan and sharding right over NCCL, and {english} H100s ran the benchmark.",
        "many-gpus-zh": f"在 CPU 上测试; {er}块 H100 通过 NCCL 运行了 {all_} 种组合, {right} 种结果正确; "
        f"{chinese}块 H100 运行过基准测试。",
        "gpus-tried": f"up to {english} H100s",
    }


def four_table(results: Path = RESULTS) -> str:
    """Return the share of ideal speed of four GPUs."""
    rows = _run(results)["four H100s"]["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        line = found.setdefault((row["mask"], row["sharding"], f'"{row["plan"]}"'), {})
        line[row["tokens"]] = f"{row['efficiency']:.2f}"
    lines = [[*key, *(at.get(length, "") for length in lengths)] for key, at in found.items()]
    return markdown(["mask", "sharding", "plan", *(f"{n >> 10}k tokens" for n in lengths)], lines)


def eight_bits(results: Path = RESULTS) -> Ratios:
    """Return how many times as fast as in 16 bits calls in 8 bits are, in every measurement."""
    found: Ratios = {}
    for row in _run(results)["rows"]:
        if row["suite"] == "8 bits":
            size, mask, length = row["case"].removeprefix("8 bits D").split(" ")
            for name in PRECISIONS:
                at = name, int(size), mask == "causal", int(length.removeprefix("N"))
                found.setdefault(at, {})["independent"] = row["ours"] / row["peers"][f"{OURS} {name}"]
    for card, device in CARDS.items():
        rows = rows_of(load(file_of(results, device, "card.json")), "eight-bits")
        times = {(row.implementation, row.of): row.milliseconds for row in rows if row.milliseconds}
        for (name, case), time in times.items():
            precision = name.removeprefix(f"{OURS} ")
            if precision in PRECISIONS:
                at = precision, case.head_size, case.causal, case.length
                found.setdefault(at, {})[card] = times[OURS, case] / time
    return found


def faster_from(found: Ratios, precision: str, size: int) -> int | None:
    """Return the tokens from which on no measurement is below 16 bits, with and without a mask, where there are several
    for each; None if there are none."""
    mine = {at: of for at, of in found.items() if at[:2] == (precision, size) and len(of) > 1}
    slow = [at[3] for at, of in mine.items() if min(of.values()) < LESS]
    return min((at[3] for at in mine if at[3] > max(slow, default=0)), default=None)


def eight_bits_tables(results: Path = RESULTS) -> dict[str, str]:
    """Return the advice, and every measurement of each precision."""
    found = eight_bits(results)
    advice = []
    for size in SIZES:
        line = [str(size)]
        for name in PRECISIONS:
            from_ = faster_from(found, name, size)
            there = [x for at, of in found.items() if at[:2] == (name, size) and at[3] == from_ for x in of.values()]
            line += [f"{length_label(from_)} tokens", f"{min(there):.2f}x"] if from_ else ["no length", ""]
        advice.append(line)
    head = ["head size", *(x for name in PRECISIONS for x in (f'"{name}" from', "at least"))]
    both = [of for of in found.values() if {"H100", "independent"} <= of.keys()]
    apart = max(abs(of["H100"] - of["independent"]) for of in both)
    return {"eight-bits-advice": markdown(head, advice), "eight-bits-apart": f"{apart:.2f}"} | {
        f"eight-bits-{name}": _measurements(found, name) for name in PRECISIONS
    }


def _measurements(found: Ratios, precision: str) -> str:
    """Return a precision's table: a line for each case, a column for each measurement."""
    names = {"H100": "H100", "independent": "H100, independent", "H200": "H200"}
    lines = []
    for (_, size, causal, length), of in sorted((at, of) for at, of in found.items() if at[0] == precision):
        cells = [f"{x:.2f}" if not math.isnan(x := of.get(name, math.nan)) else "" for name in names]
        lines.append([f"{size} {'causal' if causal else 'full'}", length_label(length), *cells])
    return markdown([f'"{precision}": head size, mask', "tokens", *names.values()], lines)
