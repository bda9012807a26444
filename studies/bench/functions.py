"""Masks and scores that are functions: python -m studies.bench.functions --results benchmarks/results

Each of MODS is measured forward, without gradients, and backward: as a function, by tilewise and by FlexAttention; as
tilewise's own value, where there is one; and by SDPA, where it takes a bias. Contenders run in turns, each warmed up;
medians count. "flex" makes its lists in every forward, as tilewise does; "flex, compiled lists" does so in a compiled
create_block_mask, and "flex, lists kept" never. What is off by more than OFF on a small case is not timed.

Every mod has a process of its own. First all mods call their contenders once, side by side, so that the caches on disk
hold what they compile; then one mod after another is measured. A row is saved at once, and a later run on the same
kernels goes on behind it. The table at the end says which bars hold; one that does not is an outcome, no failure.
Without a GPU there is a rehearsal: --device cpu --quick.
"""

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import tilewise as tw

from .. import ROOT, environment
from . import results
from .engine import excuse
from .measure import Pace, pace, sample, spread, warm_up
from .mods import ATTENTION_BIAS, MODS, Bar, Made, Mod, Size
from .suites import BACKWARD, FORWARD, PRODUCTS

FILES = (
    "studies/bench/functions.py", "studies/bench/mods.py", "src/tilewise/program/*.py", "src/tilewise/host/emit.py",
    "src/tilewise/host/statements.py",
)  # fmt: skip
"""What a row depends on beside kernels."""
SMALL, QUICK = 24 * 24, 8 * 8
"""Tokens of the case that is checked, and of --quick: squares, for images."""
OFF = 0.03
"""The largest error in bf16, as a share of a tensor's largest entry."""
ROUNDS, WARM = 7, 0.1
"""Rounds of a row, and seconds for which a contender runs before each of its samples."""
COMPILE, MEASURE = 240.0, 180.0
"""Seconds after which the process of a mod is cut off: some compiler may need longer than all the others together."""
ALIGNED = 16
"""Entries of which a row of SDPA's bias is to be a multiple."""
ROWS = 256
"""Rows whose visible keys are counted at once."""
KEPT, COMPILED = "flex, lists kept", "flex, compiled lists"
"""They differ from "flex" in the forward alone: a backward finds the forward's lists."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Problem:
    """A mod at a size: its tensors, and every contender's call of q, k, v (B, N, H, D)."""

    def __init__(self, mod: Mod, size: Size, device: torch.device, backend: str) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.size, self.made, self.backend = size, mod.make(size, draw), backend
        shape = size.B, size.N, size.H, size.D
        self.q, self.k, self.v, self.do = (
            torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16) for _ in range(4)
        )

    def attends(self) -> dict[str, Attend]:
        """Return the contenders."""
        made, backend = self.made, self.backend
        of: Any = tw.Mask.of if made.what == "mask" else tw.Score.of
        value = of(made.fn, *made.tensors)
        found = {"tilewise": ours(backend, {made.what: value})}
        found |= {f"tilewise {name}": ours(backend, options) for name, options in made.ours.items()}
        found |= flex(made, self.size, self.q.device, value.varies_with(()))
        return found if made.bias is None else found | efficient(made.bias)

    def call(self, attend: Attend, pass_: str) -> Callable[[], Any]:
        """Return what a pass repeats. A backward does so on the graph of one forward."""
        if pass_ == FORWARD:

            def forward() -> Tensor:
                with torch.no_grad():
                    return attend(self.q, self.k, self.v)

            return forward
        x = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        o = attend(*x)
        return lambda: torch.autograd.grad(o, [*x, *self.made.learned], self.do, retain_graph=True)

    def rate(self, pass_: str, seconds: float) -> float:
        """Return TFLOP/s over the visible pairs."""
        B, N, H, D = self.size
        return PRODUCTS[pass_] * 4.0 * B * H * N * N * D * self.share / seconds / 1e12

    @cached_property
    def share(self) -> float:
        """Return the share of pairs that a mask shows."""
        if self.made.what == "score":
            return 1.0
        seen = [entries(self.made, self.size, self.q.device, i).double().mean(-1) for i in range(0, self.size.N, ROWS)]
        return float(torch.cat(seen, -1).mean())


def ours(backend: str, options: dict[str, Any]) -> Attend:
    """Return a call of tilewise, whose options may name another back end."""
    given: dict[str, Any] = {"backend": backend, **options}
    return lambda q, k, v: tw.attention(q, k, v, **given)


def efficient(bias: Tensor) -> dict[str, Attend]:
    """Return calls of PyTorch's memory-efficient attention with a bias (H, N, N). It copies one whose rows are not
    aligned for every batch entry, so we give it rows that are, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, more: int = 0) -> Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        given = pad(bias, (0, more))[..., : bias.shape[-1]] if more else bias
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return scaled_dot_product_attention(*heads, attn_mask=given.expand(len(q), -1, -1, -1)).transpose(1, 2)

    more = -bias.shape[-1] % ALIGNED
    padded = {f"{ATTENTION_BIAS}, aligned": partial(attend, more=more)} if more else {}
    return {ATTENTION_BIAS: attend, **padded}


def flex(made: Made, size: Size, device: torch.device, varies: set[str]) -> dict[str, Attend]:
    """Return FlexAttention's calls: compiled on a GPU. Lists are made for each batch entry or head that differs."""
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch.donated_buffer = False  # a backward is timed several times on one graph
    torch._dynamo.reset()  # it compiles a few shapes, then gives up and runs eagerly
    compiled: Any = (lambda fn: fn) if device.type == "cpu" else (lambda fn: torch.compile(fn, dynamic=False))
    run, fn, tensors = compiled(flex_attention), made.fn, made.tensors
    B, H = (getattr(size, name) if name in varies else None for name in "BH")

    def attend(**options: Callable[[], Any]) -> Attend:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = (t.transpose(1, 2) for t in (q, k, v))
            return run(*heads, **{name: make() for name, make in options.items()}).transpose(1, 2)

        return call

    if made.what == "score":
        return {"flex": attend(score_mod=lambda: lambda s, b, h, i, j: fn(s, b, h, i, j, *tensors))}

    def lists(create: Any) -> Callable[[], Any]:
        return lambda: create(lambda b, h, i, j: fn(b, h, i, j, *tensors), B, H, size.N, size.N, device=device)

    each = {"flex": lists(create_block_mask), COMPILED: lists(compiled(create_block_mask))}
    return {name: attend(block_mask=make) for name, make in (each | {KEPT: cache(lists(create_block_mask))}).items()}


def entries(made: Made, size: Size, device: torch.device, first: int = 0, S: Tensor | None = None) -> Tensor:
    """Evaluate a function for all keys and for ROWS rows from `first`, or for all of S, in plain torch."""
    rows = torch.arange(size.N, device=device)[first : first + ROWS if S is None else None]
    b, h = (torch.arange(n, device=device) for n in (size.B, size.H))
    at = b[:, None, None, None], h[:, None, None], rows[:, None], torch.arange(size.N, device=device)
    found = made.fn(*at, *made.tensors) if made.what == "mask" else made.fn(S, *at, *made.tensors)
    return found.expand(*found.shape[:-2], len(rows), size.N)


def truth(problem: Problem) -> list[Tensor]:
    """Return o, and the gradients of q, k, v and of what learns, by plain torch in fp64."""
    wide = [t.detach().double().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    tensors = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in problem.made.tensors
    ]
    made = problem.made._replace(tensors=tuple(tensors))
    q, k, v = (t.transpose(1, 2) for t in wide)
    S = q @ k.mT * problem.size.D**-0.5
    found = entries(made, problem.size, S.device, S=S) if made.what == "score" else dense(made, problem.size, S)
    o = (found.softmax(-1) @ v).transpose(1, 2)
    return [o.detach(), *torch.autograd.grad(o, [*wide, *made.learned], problem.do.double())]


def dense(made: Made, size: Size, S: Tensor) -> Tensor:
    """Return S with -inf where a mask hides the key."""
    seen = torch.cat([entries(made, size, S.device, first) for first in range(0, size.N, ROWS)], -2)
    return S.masked_fill(~seen, -torch.inf)


def checked(problem: Problem, true: list[Tensor], attend: Attend, pass_: str) -> dict[str, float]:
    """Return the largest error of each result, as a share of the tensor's largest entry."""
    found = problem.call(attend, pass_)()
    got, want = ([found], true[:1]) if pass_ == FORWARD else (found, true[1:])
    names = ["o"] if pass_ == FORWARD else ["dq", "dk", "dv", *["dtensor"] * len(problem.made.learned)]
    return {
        name: float((g.double() - t).abs().max() / t.abs().max()) for name, g, t in zip(names, got, want, strict=True)
    }


def race(problem: Problem, attends: dict[str, Attend], pass_: str, rounds: int) -> tuple[dict[str, float], Any]:
    """Return the median seconds of each contender, and why others have none. Each round has another order."""
    device = problem.q.device
    calls: dict[str, tuple[Callable[[], Any], Pace]] = {}
    samples: dict[str, list[float]] = {}
    why: dict[str, str] = {}
    for turn in range(rounds):
        for name in Random(turn).sample([*attends], len(attends)):
            if name in why:
                continue
            try:
                if name not in calls:
                    call = problem.call(attends[name], pass_)
                    calls[name] = call, pace(call, device)
                call, paced = calls[name]
                warm_up(call, paced, device, WARM if device.type == "cuda" else 0.0)
                samples.setdefault(name, []).append(sample(call, paced, device))
            except Exception as error:
                why[name] = excuse(error, ())[1]
    return {name: spread(found)[1] for name, found in samples.items() if name not in why}, why


def rows_of(
    mod: Mod, sizes: list[Size], device: torch.device, backend: str, done: set[tuple[str, str, str]]
) -> Iterator[dict[str, Any]]:
    """Measure a mod's rows that are not done: contenders that are right on a small case."""
    todo = {which: [n for n in sizes if (mod.name, which, str(n)) not in done] for which in (FORWARD, BACKWARD)}
    if not any(todo.values()):
        return
    small = Problem(mod, mod.of_length(QUICK if device.type == "cpu" else SMALL), device, backend)
    true = truth(small)
    for pass_, left in todo.items():
        errors: dict[str, dict[str, float]] = {}
        refused: dict[str, str] = {}
        for name, attend in (small.attends() if left else {}).items():
            if pass_ == FORWARD or name not in (KEPT, COMPILED):
                try:
                    errors[name] = checked(small, true, attend, pass_)
                except Exception as error:
                    refused[name] = excuse(error, ())[1]
        right = [name for name, each in errors.items() if all([error <= OFF for error in each.values()])]  # no nan
        wrong = {name: "wrong, so not timed" for name in errors if name not in right}
        for size in left:
            problem = Problem(mod, size, device, backend)
            attends = {name: run for name, run in problem.attends().items() if name in right}
            seconds, why = race(problem, attends, pass_, ROUNDS if device.type == "cuda" else 2)
            bars = [judged(bar, seconds) for bar in mod.bars if pass_ in bar.passes]
            yield {
                "mod": mod.name, "size": str(size), "pass": pass_, "backend": backend,
                "milliseconds": {name: 1e3 * each for name, each in seconds.items()},
                "tflops": {name: problem.rate(pass_, each) for name, each in seconds.items()},
                "errors": errors, "why": refused | wrong | why, "bars": bars,
            }  # fmt: skip
            del problem, attends
            if device.type == "cuda":
                torch.cuda.empty_cache()


def judged(bar: Bar, seconds: dict[str, float]) -> dict[str, Any]:
    """Return a bar with its ratio, None where one of both has no time."""
    both = bar.ours in seconds and bar.than in seconds
    ratio = seconds[bar.than] / seconds[bar.ours] if both else None
    return {"ours": bar.ours, "than": bar.than, "least": bar.least, "ratio": ratio}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each bar, and how many hold."""
    found, held = [], 0
    for row, bar in [(each, bar) for each in rows for bar in each["bars"]]:
        ratio, holds = bar["ratio"], bar["ratio"] is not None and bar["ratio"] >= bar["least"]
        said = "not measured" if ratio is None else f"{ratio:6.3f} {'holds' if holds else 'MISSED'}"
        held += holds
        what = f"{row['mod']}, {row['size']}, {row['pass']}"
        found.append(f"{what:<48} {bar['ours']} against {bar['than']}, at least {bar['least']}: {said}")
    return [*found, f"{held} of {len(found)} bars hold"]


def saved(path: Path, env: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a file's rows, if they are of the same kernels, programs and versions."""
    content: Any = results.unpacked(json.loads(path.read_text())) if path.exists() else {"environment": {}}
    same = all(content["environment"].get(name) == env[name] for name in ("device", "kernels", "programs", "versions"))
    return content["rows"] if same else []


def measure(
    path: Path | None, env: dict[str, Any], names: list[str], quick: bool, device: torch.device, backend: str
) -> list[dict[str, Any]]:
    """Measure what is missing of some mods, and keep each row at once. Return these mods' rows."""
    before = saved(path, env) if path else []
    rows = [row for row in before if row["mod"] not in names or "tilewise" in row["milliseconds"]]
    done = {(row["mod"], row["pass"], row["size"]) for row in rows}
    for mod in (MODS[name] for name in names):
        sizes = [mod.of_length(QUICK)] if quick else [*mod.sizes]
        for row in rows_of(mod, sizes, device, backend, done):
            rows.append(row)
            times = {name: round(each, 3) for name, each in row["milliseconds"].items()}
            print(mod.name, row["size"], row["pass"], times, row["why"] or "", flush=True)
            if path:
                content = {"device": env["device"], "environment": env, "rows": rows}
                results.save_states(content, [env])
                results.write(path, content)
    return [row for row in rows if row["mod"] in names]


def compile_first(mod: Mod, sizes: list[Size], device: torch.device, backend: str) -> None:
    """Call every contender of a mod once in each pass at each size, and print how long that took."""
    for size in (mod.of_length(QUICK if device.type == "cpu" else SMALL), *sizes):
        problem = Problem(mod, size, device, backend)
        for pass_, (name, attend) in itertools.product((FORWARD, BACKWARD), problem.attends().items()):
            began, said = time.perf_counter(), ""
            try:
                problem.call(attend, pass_)()
            except Exception as error:
                said = excuse(error, ())[1]
            print(f"{mod.name} {size} {pass_} {name}: {time.perf_counter() - began:.1f} s {said}", flush=True)


def each_mod(arguments: list[str], at_once: int, seconds: float) -> int:
    """Run a process for each mod; return how many died or were cut off."""
    command = [sys.executable, "-m", "studies.bench.functions", *arguments]

    def run(name: str) -> bool:
        try:
            done = subprocess.run([*command, "--mod", name], env=environment(), check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            print(f"{name} was cut off after {seconds:.0f} s", flush=True)
            return True
        return done.returncode != 0

    with ThreadPool(at_once) as pool:
        return sum(pool.map(run, MODS, chunksize=1))


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return what identifies a measurement: that of other results, and a hash of FILES."""
    texts = [path.read_bytes() for pattern in FILES for path in sorted(ROOT.glob(pattern))]
    return results.environment(device) | {"programs": hashlib.sha256(b"".join(texts)).hexdigest()[:12]}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and return how many processes died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="write <device name>/functions.json in this folder, and resume it")
    parser.add_argument("--mod", action="append", choices=MODS, help="measure this one alone, in this process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="of tilewise's calls; left out: hopper on sm_90, cpu on a CPU, triton else")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} tokens alone")
    parser.add_argument("--compile", action="store_true", help="call contenders once, and measure nothing")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    sm_90 = device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    backend = given.backend or ("cpu" if device.type == "cpu" else "hopper" if sm_90 else "triton")
    env = environment_of(device)
    path = results.file_of(given.results, env["device"], "functions.json") if given.results else None
    if path and not given.mod:
        command = sys.argv[1:] if arguments is None else arguments
        if device.type == "cuda":
            each_mod([*command, "--compile"], len(MODS), COMPILE)
        died = each_mod(command, 1, MEASURE)
        print("\n".join(table(saved(path, env))))
        return died
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FlexAttention that is not compiled, and of Inductor
        if given.compile:
            for mod in (MODS[name] for name in given.mod or MODS):
                compile_first(mod, [mod.of_length(QUICK)] if given.quick else [*mod.sizes], device, backend)
            return 0
        rows = measure(path, env, given.mod or [*MODS], given.quick, device, backend)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
