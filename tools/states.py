"""The states of kernels (studies/bench/state.py), and results whose kernels are still the same.

python tools/states.py            every state, and which results are older
python tools/states.py date       gives results that know their commit alone the states of that commit's kernels
python tools/states.py carry REF  compiles the launches of REF and those here for sm_90, without a GPU: a state
                                        that changed while no count of an instruction did is carried over (carried.json)
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from versions import source

from studies.bench import results, state
from studies.bench.results import RESULTS
from studies.console import sentences

ROOT = Path(__file__).parents[1]
CHIPS = ("hopper",)
DATED = ("*/bench.json", "*/tune.json", "*/runs/*.json")
"""Files whose results say what the kernels were."""


def environments(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the environment of every run that a file holds."""
    if "environment" in content:
        return [content["environment"]]
    slots = [slot["environment"] for slot in content.get("slots", ())]
    parts = [part for part in content.values() if isinstance(part, dict)]
    runs = [run for part in parts for run in part.values() if isinstance(run, dict) and "environment" in run]
    return slots + [run["environment"] for run in runs]


def date(files: list[Path]) -> None:
    """Add missing states, from the commit that a result names; one with "+" was measured with uncommitted changes."""
    of_commit: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
    for file in files:
        content = results.unpacked(json.loads(file.read_text()))
        missing = [env for env in environments(content) if env["kernels"] not in content.get("kernels", {})]
        for env in missing:
            commit = env["commit"]
            if not commit or commit.endswith("+"):
                continue
            at = commit, CHIPS if "cuda" in env["versions"] else ()
            if at not in of_commit:
                with source(commit) as src:
                    of_commit[at] = state.states(src / "tilewise", at[1])
            content.setdefault("kernels", {})[env["kernels"]] = of_commit[at]
        if missing and "kernels" in content:
            results.write(file, content)


def carry(ref: str) -> list[dict[str, Any]]:
    """Find states at a revision that compile to the same instructions, as often, as their successors here."""
    now = state.states(chips=CHIPS)
    with source(ref, "tests") as src:
        before = state.states(src / "tilewise", CHIPS)
        renamed = [name for name in now if name in before and before[name] != now[name]]
        counts = [dict(instructions(tree)) for tree in (src.parent, ROOT)]
    found = []
    for name in renamed:
        of = [{at: count for at, count in each.items() if at.startswith(name)} for each in counts]
        total = sum(sum(count.values()) for count in of[1].values())
        if of[0] == of[1] and total:
            found.append({"kernel": name, "old": before[name], "new": now[name], "from": ref, "instructions": total})
        else:
            print(f"{name} has changed, and its instructions with it" if total else f"{name} is not compiled here")
    return found


def instructions(tree: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Count each instruction in each kernel of a tree."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "tests"), str(tree), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(ROOT / "tools" / "instructions.py")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        at, counts = json.loads(line)
        yield at, counts


def old() -> Iterator[str]:
    """Yield the results of older kernels, file by file."""
    carried = state.carried(RESULTS)
    for file in [*sorted(RESULTS.glob("*/bench.json")), *sorted(RESULTS.glob("*/tune.json"))]:
        content = results.unpacked(json.loads(file.read_text()))
        for name in dict.fromkeys(env["kernels"] for env in environments(content)):
            before = content.get("kernels", {}).get(name)
            differ = results.changed(before, [""], carried) if before else ["what they were is not known"]
            yield f"{file.relative_to(RESULTS)}, kernels {name}: {', '.join(differ) or 'as they are'}"


def main(arguments: list[str]) -> None:
    """Run the command."""
    match arguments:
        case []:
            for name, of in state.states(chips=CHIPS).items():
                print(f"{of:14} {name}")
            print(*old(), sep="\n")
        case ["date"]:
            date([file for pattern in DATED for file in sorted(RESULTS.glob(pattern))])
        case ["carry", ref]:
            file = RESULTS / state.CARRIED
            before = json.loads(file.read_text()) if file.exists() else []
            found = carry(ref)
            file.write_text(results.text([*before, *found]) + "\n")
            print(*(f"carried over: {each['kernel']}" for each in found), sep="\n")
        case _:
            raise ValueError(f"there is no {' '.join(arguments)!r}; the commands are:\n{__doc__}")


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
