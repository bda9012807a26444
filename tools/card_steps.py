"""The steps of `make card`, most valuable first. Each is a value; add one by adding a line to `steps`."""

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import studies.ablation  # noqa: F401, adds its suite
from studies.bench import functions, models, state
from studies.bench.results import file_of, kernels_of
from studies.bench.suites import SUITES

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

SHARED = ("mask", "score", "gradient of a bias", "renormalization", "lists of tiles")
HOPPER, TRITON = ("hopper", *SHARED), ("triton", *SHARED)
MINUTES = {
    "host": 0.5,
    "variants": 4,
    "decode": 1,
    "eight-bits": 7,
    "prefill": 1,
    "paper": 8,
    "classic": 1.5,
    "short": 4.5,
    "ablation": 1.5,
    "llmc": 2,
    "long": 4,
}
"""About what a suite takes on an H200 or H100, in the order in which they are measured."""
CHIPS = ("hopper",)
"""The kind of the portable kernels' rows that an H200 reads."""


@dataclass(frozen=True)
class Step:
    """Name one command, and the kernels that its outcome depends on."""

    name: str
    command: tuple[str, ...]
    """Behind `python`."""
    kernels: tuple[str, ...]
    """Beginnings of names in `state.KERNELS`: "hopper", "triton forward"; "" is all."""
    minutes: float
    """About how long it takes."""
    files: tuple[str, ...] = ()
    """Patterns of further files: where they have changed, it runs again."""
    silence: float = 3.0
    """Minutes without a word after which it hangs."""
    fine: tuple[int, ...] = (0,)
    """Exit statuses that are no failure."""
    folder: Path = ROOT

    def state(self) -> str:
        """Hash its kernels, on sm_90."""
        found = state.states(chips=CHIPS)
        return state.digest({name: of for name, of in found.items() if name.startswith(self.kernels)})

    def text(self) -> str:
        """Hash its own files."""
        paths = sorted({path for pattern in self.files for path in self.folder.glob(pattern)})
        return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


SIZES = "tests/card/test_head_sizes.py"
"""Tests that take far longer than the others: a thousand pairs of kernels to compile."""
LONG = "tests/card/test_wide_heads.py", "tests/card/test_pieces.py"
"""Tests whose kernels take long to compile."""
FUNCTIONS = "tests/card/test_functions.py"
"""Tests with kernels of their own for each function, a thousand, too."""
PARALLEL = "studies.bench.parallel"
"""The module that measures many GPUs."""


def of_tests(
    name: str, *arguments: str, kernels: tuple[str, ...], minutes: float, files: str, workers: int = CORES,
    silence: float = 3.0,
) -> Step:  # fmt: skip
    """Return a step of pytest, which runs the tests that have no outcome yet. No test left to run (5) is no failure."""
    options = ["-p", "card_plugin", "-p", "no:benchmark", "-q", "-rN"]  # that plugin warns with xdist
    options += ["-n", str(min(workers, CORES)), "--dist", "worksteal"] if workers else []
    return Step(name, ("-m", "pytest", *options, *arguments), kernels, minutes, (files,), silence, fine=(0, 5))


def of_suite(suite: str, file: Path, minutes: float) -> Step:
    """Return a step that measures a suite's missing cases into a file."""
    command = ("-m", "studies", "bench", "--suite", suite, "--resume", "--json", str(file))
    of, kernels = SUITES[suite], state.states(chips=CHIPS)
    rows = ((case, peer, pass_) for case in of.cases for peer, pass_ in product(of.peers_of(case), of.passes))
    return Step(f"bench {suite}", command, tuple({name for row in rows for name in kernels_of(*row, kernels)}), minutes)


def steps(results: Path, device: str) -> Iterator[Step]:
    """Yield all steps of a device, which write to its folder in `results`."""
    every = ("",)
    files = [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob("tests/card/test_*.py"))]
    yield of_tests("card functions", FUNCTIONS, kernels=every, minutes=12, files=FUNCTIONS, silence=6)
    measured = ("-m", "studies.bench.functions", "--results", str(results))
    yield Step("functions, in time", measured, every, 12, functions.FILES, silence=6)
    for path in (path for path in files if path not in (SIZES, FUNCTIONS)):
        name = f"card {Path(path).stem.removeprefix('test_')}"
        minutes = 3 if path in LONG else 0.8
        yield of_tests(name, path, "-k", "not cost", kernels=every, minutes=minutes, files=path)
    card = "tests/card"
    yield of_tests("card, in time", card, "-k", "cost", kernels=every, minutes=5.5, files=f"{card}/*.py", workers=1)
    cases = "tests/conformance"
    yield of_tests("conformance hopper", cases, "-k", "hopper", kernels=HOPPER, minutes=6, files=f"{cases}/*.py")
    yield of_tests("conformance triton", cases, "-k", "triton", kernels=TRITON, minutes=6, files=f"{cases}/*.py")
    meet = "tests/features"
    yield of_tests("pairs of features", meet, "-k", "hopper or triton", kernels=every, minutes=6, files=f"{meet}/*.*")
    flash = "tests/compat/flash_attn"
    yield of_tests("flash_attn", flash, kernels=every, minutes=1.5, files=f"{flash}/**/*.py")
    rest = "not hopper and not triton and not cpu"
    yield of_tests(
        "conformance, the rest", cases, "-k", rest, kernels=every, minutes=5, files=f"{cases}/*.py", silence=10
    )  # one of its tests goes through the whole list by itself
    hopper, slower = "tests/hopper/test_on_hopper.py", "no_slower"
    yield of_tests(
        "on hopper", hopper, "-k", f"not {slower}", kernels=HOPPER, minutes=5, files=hopper, workers=6, silence=6
    )
    yield of_tests("on hopper, in time", hopper, "-k", slower, kernels=HOPPER, minutes=1, files=hopper, workers=1)
    yield of_tests("card every head size", SIZES, kernels=every, minutes=15, files=SIZES)
    for suite, minutes in MINUTES.items():
        yield of_suite(suite, file_of(results, device, "card.json"), minutes)
    steps_of_models = ("-m", "studies", "bench", "--suite", "models", "--results", str(results))
    yield Step("models, in time", steps_of_models, every, 11, models.FILES, silence=6)
    short = ("-m", "studies.bench.eager", "--results", str(results))
    yield Step("short calls, in time", short, every, 6, ("studies/bench/eager.py",), silence=4)
    rated = f"{PARALLEL.replace('.', '/')}.py"
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu", "-m", PARALLEL)
    yield Step("parallel, in time", (*ranks, "--results", str(results)), every, 6, (rated,), silence=10)
    serve = ("-m", "studies.bench.serving", "--results", str(results))
    yield Step("serving, in time", serve, every, 3, ("studies/bench/serving.py",))
    trained = ("-m", "studies", "eight_bits", "--table", "training", "--model", "gpt2-124m", "--device", "cuda")
    yield Step("GPT-2 124M in 8 bits", trained, HOPPER, 3, ("studies/eight_bits/*.py",), silence=10)
    fit = ("-m", PARALLEL, "--fit", "--results", str(results))
    yield Step("parallel, the model fitted", fit, every, 0.1, (rated, "src/tilewise/parallel/costs.py"))
    yield Step("documents", ("tools/card.py", "--documents", "--results", str(results)), every, 1)
