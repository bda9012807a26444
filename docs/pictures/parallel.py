"""Who sends keys to whom, by plan and sharding; and the tables of docs/use/many-gpus.md: modelled and measured."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

sys.path.append(str(Path(__file__).parents[2] / "src"))
import tilewise as tw
from tilewise.parallel.costs import Cluster, Sizes, cost
from tilewise.parallel.pieces import Pieces, length
from tilewise.parallel.reach import reach_of
from tilewise.parallel.shardings import Contiguous, Zigzag, deal
from tilewise.parallel.shards import Shards

TWO = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "parallel-x2.json"
"""What two H200s did."""
RANKS, N, CHUNK = 8, 4096, 64
GPUS, TOKENS = (8, 16, 64, 256, 1024), (1 << 16, 1 << 18, 1 << 20, 1 << 22, 10 << 20)
HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128


def documents() -> tw.Mask:
    """Return packed documents of log-normal lengths, causal."""
    drawn = torch.randn(N // 64, generator=torch.Generator().manual_seed(0))
    ends = torch.exp(drawn * 1.2 + 5.0).long().clamp(16, N // 4).cumsum(0)
    ids = torch.bucketize(torch.arange(N), ends, right=True)[None]
    return tw.Causal() & tw.Documents(ids, ids)


def sent(mask: tw.Mask, pieces: tuple[Pieces, ...]) -> torch.Tensor:
    """Return the keys that each rank (row) gets from each other one (column), in shards of N / RANKS."""
    s = Shards(pieces, 0, reach_of(mask, N), mask, (), {})
    found = [[length(s.pair(to, source).keys) if to != source else 0 for source in range(RANKS)] for to in range(RANKS)]
    return torch.tensor(found) * RANKS / N


def cases() -> dict[str, torch.Tensor]:
    """Return the matrices that are drawn."""
    packed = documents()
    counts = reach_of(packed, N).counts()
    solved = deal([float(part.sum()) for part in counts.split(CHUNK)], N, RANKS, CHUNK)
    swapped = (torch.ones(RANKS, RANKS) - torch.eye(RANKS)) / RANKS
    return {
        "ring, Zigzag, causal": sent(tw.Causal(), Zigzag(None).cut(N, RANKS)),
        "ring, Contiguous, window": sent(tw.Causal() & tw.Window(255, 0), Contiguous(None).cut(N, RANKS)),
        "ring, Balanced, documents": sent(packed, solved),
        "gather, any mask": torch.ones(RANKS, RANKS) - torch.eye(RANKS),
        "ulysses, any mask": swapped,
    }


def who_sends_what() -> Any:
    """Draw one matrix a plan."""
    drawn = cases()
    figure, axes = plt.subplots(2, 3, figsize=(7.8, 5.4), layout="constrained")
    axes.flat[-1].set_axis_off()
    for axis, (name, matrix) in zip(axes.flat, drawn.items(), strict=False):
        axis.imshow(matrix.tolist(), vmin=0.0, vmax=1.0, cmap="Blues")
        axis.set_title(f"{name}\n{float(matrix.sum()) / RANKS:.2f} shards a rank", fontsize=9)
        axis.set_xlabel("from rank")
        axis.set_xticks(range(RANKS))
        axis.set_yticks(range(RANKS))
        axis.grid(visible=False)
    for axis in axes[:, 0]:
        axis.set_ylabel("to rank")
    return figure


def table() -> str:
    """Return the modelled efficiency of the fastest plan, and what it receives and holds, by GPUs and tokens."""
    ideal = Cluster()
    lines = ["| GPUs | " + " | ".join(_short(n) for n in TOKENS) + " |", "|---" * (len(TOKENS) + 1) + "|"]
    for ranks in GPUS:
        cells = []
        for tokens in TOKENS:
            sizes = Sizes(tokens, ranks, HEADS, KEY_HEADS, HEAD_SIZE)
            plans = {"ring": ("ring", 1), "gather": ("gather", 1)}
            plans |= {f"Grid({u}, {ranks // u})": ("ring", u) for u in (2, 4, 8) if u < ranks}
            plans |= {"ulysses": ("ulysses", 1)} if HEADS % ranks == 0 else {}
            known = {name: cost(*given, sizes) for name, given in plans.items()}
            best = min(known, key=lambda name: known[name].seconds)
            flops = 2.0 * tokens * tokens * HEADS * HEAD_SIZE / ranks
            part = flops * (1 / ideal.forward + 2.5 / ideal.backward) / known[best].seconds
            cells.append("" if tokens // ranks < 256 or tokens / ranks > 2**19 else f"{best} {part:.2f}")
        lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory() -> str:
    """Return what a rank holds beside what one GPU holds for its share of the work, by plan, as the model has it."""
    lines = ["| plan | holds besides | GB |", "|---|---|---|"]
    seen, sizes = "k and v that its rows see, three times", Sizes(1 << 19, 8, HEADS, KEY_HEADS, HEAD_SIZE)
    window = sizes._replace(most=8191 / (7 * (sizes.N // 8)))  # of keys that seven others hold
    for plan, mask, x, what in (
        ("ulysses", "", sizes, "q, k, v, o and do of its heads"),
        ("ring", "", sizes, "two ranks' k and v; three times its rows of q in fp32"),
        ("gather", "", sizes, "all k and v, twice their gradients in fp32; three times its rows of q in fp32"),
        ("halo", ", a causal mask", sizes, f"{seen} their gradients in fp32; twice its rows of q in fp32"),
        ("halo", ", a window of 8k", window, "the same, of fewer keys"),
    ):
        lines.append(f'| "{plan}"{mask} | {what} | {cost(plan, 1, x).memory / 1e9:.1f} |')
    return "\n".join(lines)


def measured(file: Path = TWO) -> str:
    """Return the measured efficiency of each plan, by mask, sharding and tokens."""
    rows = json.loads(file.read_text())
    lengths = sorted({row["tokens"] for row in rows})
    named = {"window": "a window of 8k"}
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        case = f'{named.get(row["mask"], row["mask"])} | {row["sharding"]} | "{row["plan"]}"'
        cells.setdefault(case, {})[row["tokens"]] = f"{row['efficiency']:.2f}"
    lines = [
        "| mask | sharding | plan | " + " | ".join(_short(n) for n in lengths) + " |",
        "|---" * (3 + len(lengths)) + "|",
    ]
    return "\n".join(
        [*lines, *(f"| {case} | " + " | ".join(of.get(n, "") for n in lengths) + " |" for case, of in cells.items())]
    )


def _short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


if __name__ == "__main__":
    print(table(), memory(), measured(), sep="\n\n")
