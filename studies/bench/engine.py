"""Run a suite: check each peer's results, then time all peers in turn, round after round."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from random import Random
from typing import NamedTuple

import torch

from .accuracy import Inputs, Truth, Verdict, run_once
from .measure import (
    Pace,
    bound,
    host_cost,
    matmul,
    pace,
    peak_memory,
    peak_memory_of_process,
    sample,
    spread,
    warm_up,
)
from .peers import PEERS, Attention, Peer
from .results import FAILED, OK, REFUSED, SKIPPED, WRONG, Row
from .suites import BOTH, FORWARD, Case, Suite

CPU_MATMUL = 2048
"""Side of the matrix product on a CPU, at most."""
TINY = 128
"""Tokens of the problem on which the host's cost is measured."""
Watch = Callable[[str], None]


class Contender(NamedTuple):
    """A peer whose result on these inputs is right, or one that has `no` time coming: (status, why)."""

    peer: Peer
    no: tuple[str, str] | None = None
    verdict: Verdict | None = None
    attend: Attention | None = None
    x: Inputs | None = None


def run(
    suite: Suite,
    device: torch.device,
    seconds: float | None = None,
    watch: Watch = lambda text: None,
    peers: dict[str, Peer] = PEERS,
) -> Iterator[list[Row]]:
    """Yield the rows of one case after another. Cases that begin after `seconds` are skipped, and their rows say so."""
    begin = time.monotonic()
    for case in suite.cases:
        chosen = [peers[name] for name in suite.peers_of(case)]
        if seconds is not None and time.monotonic() - begin > seconds:
            why = f"the time budget of {seconds:g} s was spent"
            yield [_row(case, Contender(p, (SKIPPED, why)), pass_) for p in chosen for pass_ in suite.passes]
            continue
        yield contest(suite, case, chosen, device, watch)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def contest(suite: Suite, case: Case, peers: Sequence[Peer], device: torch.device, watch: Watch) -> list[Row]:
    """Return all rows of one case."""
    inputs: dict[Case, Inputs] = {}
    truths: dict[Case, Truth] = {}
    contenders = []
    for peer in peers:
        watch(f"{case}: checking {peer.name}")
        contenders.append(_admit(suite, peer.computes(case), peer, inputs, truths, device))
    del truths
    rows = []
    for pass_ in suite.passes:
        watch(f"{case}: timing the {pass_}")
        rows += _race(suite, case, contenders, pass_, device)
    if device.type == "cpu" and case.length == max(c.length for c in suite.cases):
        for row in rows:
            if row.status == OK and row.pass_ == BOTH:
                watch(f"{case}: memory of {row.implementation}")
                row.peak_bytes = peak_memory_of_process(case, row.implementation, row.pass_)
    return rows


def _admit(
    suite: Suite, case: Case, peer: Peer, inputs: dict[Case, Inputs], truths: dict[Case, Truth], device: torch.device
) -> Contender:
    """Calls a peer once and judges its result. Dropout of another rule than tilewise's is judged with dropout off."""
    slow, lengths = suite.sparse
    if peer.name == slow and case.length not in lengths:
        lengths_text = " and ".join(str(length) for length in lengths)
        return Contender(peer, (SKIPPED, f"compiles for every shape; only timed at {lengths_text} tokens"))
    if reason := peer.why_not(case, device):
        return Contender(peer, (REFUSED, reason))
    judged = case if peer.seeded else replace(case, dropout=0.0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            if case not in inputs:
                inputs[case] = Inputs.random(case, device)
            x = inputs[case]
            if judged not in truths:
                truths[judged] = Truth(judged, x)
            attend = peer.prepare(judged, device)
            verdict = truths[judged].judge(run_once(peer, attend, x, suite.passes), peer.share)
            attend = attend if judged == case else peer.prepare(case, device)
        except Exception as error:
            return Contender(peer, excuse(error, heard))
    if verdict.wrong:
        by = f"more than {peer.share:g} of the largest entry, and " if peer.share else ""
        by = f"{by}more than twice as much as plain torch in {case.dtype}"
        why = f"{', '.join(verdict.wrong)} wrong by {by}: not timed"
        return Contender(peer, (WRONG, why), verdict)
    return Contender(peer, None, verdict, attend, x)


def excuse(error: Exception, heard: Sequence[warnings.WarningMessage]) -> tuple[str, str]:
    """Return why a call failed, from its error and from the warnings in which PyTorch hides its reasons."""
    if isinstance(error, torch.OutOfMemoryError):
        return FAILED, "out of memory"
    text = str(error).strip() or type(error).__name__
    if "No available kernel" in text or "No viable backend" in text:
        reasons = [str(w.message).split(" (Triggered", 1)[0].strip() for w in heard]
        reasons = [
            reason for reason in reasons if "not used because" not in reason and "been runtime disabled" not in reason
        ]
        return REFUSED, "; ".join(dict.fromkeys(reasons)) or "PyTorch has no such kernel for this call"
    return FAILED, f"{type(error).__name__}: {text.splitlines()[0][:160]}"


def _race(suite: Suite, case: Case, contenders: Sequence[Contender], pass_: str, device: torch.device) -> list[Row]:
    """Time every contender once a round, with the matrix product in between.

    Each round has another order: where power limits the clock, a call's time depends on the contender before, unless
    the suite warms each up.
    """
    side = suite.matmul if device.type == "cuda" else min(suite.matmul, CPU_MATMUL)
    product = matmul(side, case.type, device)
    product_pace = pace(product, device)
    rate: list[float] = []
    paces: dict[str, Pace] = {}
    peaks: dict[str, int] = {}
    samples: dict[str, list[float]] = {c.peer.name: [] for c in contenders}
    excuses: dict[str, tuple[str, str]] = {c.peer.name: c.no for c in contenders if c.no}
    for turn in range(suite.rounds):
        rate.append(2.0 * side**3 / sample(product, product_pace, device) / 1e12)
        for c in Random(turn).sample(contenders, len(contenders)):
            name = c.peer.name
            if name in excuses or c.attend is None or c.x is None:
                continue
            try:
                with bound(c.peer, c.attend, c.x, pass_) as call:
                    if name not in paces:
                        paces[name] = pace(call, device)
                        if device.type == "cuda":
                            peaks[name] = peak_memory(call, device)
                    warm_up(call, paces[name], device, suite.warm)
                    samples[name].append(sample(call, paces[name], device))
            except Exception as error:
                excuses[name] = excuse(error, ())
    rows = [
        _row(case, c._replace(no=excuses.get(c.peer.name)), pass_, samples[c.peer.name], rate, peaks.get(c.peer.name))
        for c in contenders
    ]
    if device.type == "cuda" and suite.host:
        for row, c in zip(rows, contenders, strict=True):
            if row.status == OK and c.peer.name != suite.sparse[0]:
                tiny = c.peer.computes(replace(case, batch=1, length=TINY))
                row.host_microseconds = _host_microseconds(c.peer, tiny, pass_, device)
                if pass_ == FORWARD:
                    row.host_microseconds_no_grad = _host_microseconds(c.peer, tiny, pass_, device, grad=False)
    return rows


@lru_cache(256)
def _host_microseconds(peer: Peer, tiny: Case, pass_: str, device: torch.device, grad: bool = True) -> float:
    x = Inputs.random(tiny, device)
    with torch.set_grad_enabled(grad), bound(peer, peer.prepare(tiny, device), x, pass_) as call:
        return host_cost(call, device) * 1e6


def _row(
    case: Case,
    c: Contender,
    pass_: str,
    samples: Sequence[float] = (),
    rate: Sequence[float] = (),
    peak: int | None = None,
) -> Row:
    row = Row(asdict(case), c.peer.name, pass_)
    if c.verdict:
        row.error, row.error_plain = c.verdict.error[pass_], c.verdict.plain[pass_]
    if c.no:
        row.status, row.why = c.no
        return row
    low, median, high = spread(list(samples))
    row.milliseconds, row.milliseconds_p20, row.milliseconds_p80 = median * 1e3, low * 1e3, high * 1e3
    row.tflops = c.peer.computes(case).flops(pass_) / median / 1e12
    row.matmul_tflops = spread(list(rate))[1]
    row.of_matmul = row.tflops / row.matmul_tflops
    row.peak_bytes = peak
    return row
