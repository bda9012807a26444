"""Tier 3: the kernels compile for chips that are not here, with the oldest and the newest Triton, and compile well.

From sm_80 on, no local loads or stores in the loops of 16-bit kernels with head sizes up to 128. Elsewhere their number
is in spills.json and may not grow; CONTRIBUTING.md has the command that measures it again. What is known (known.py) is
not compiled.
"""

import json
import os
import re
import sys
from collections import defaultdict
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from known import ANEW, remember
from scripts import NEWEST, RELEASES, folder_of, lines

HERE = Path(__file__).parent
RECORD = HERE / "spills.json"

KIBIBYTES = {
    "sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
}  # fmt: skip
"""Shared memory that a block may have; AMD's chips have 64 KiB."""
TENSOR_MEMORY_COLUMNS = 512
MATRIX = {
    "sm_70": set(),  # Triton no longer knows the matrix instructions of Volta and of Turing: both multiply by FMA
    "sm_75": set(),
    "sm_80": {"HMMA"},
    "sm_86": {"HMMA"},
    "sm_89": {"HMMA"},
    "sm_90": {"HGMMA", "HMMA"},
    "sm_100": {"UTCHMMA", "HMMA"},
    "sm_120": {"HMMA"},
    "gfx90a": {"v_mfma"},
    "gfx942": {"v_mfma"},
    "gfx1100": {"v_wmma"},
}
"""The matrix instructions that a target may use."""
BEST = {"sm_90": {"HGMMA"}, "sm_100": {"UTCHMMA"}}
"""Those that it must use for 16-bit types and head sizes up to 128."""
FREE_OF_SPILLS = tuple(target for target in KIBIBYTES if target not in ("sm_70", "sm_75"))
WITH_BOTH = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Targets that are compiled for with both: a Triton takes a minute of each."""
NO_PRODUCTS = ("attention_backward_delta", "attention_backward_sink", "attention_list_tiles")
KERNELS = {
    "attention_forward", "attention_backward_dkdv", "attention_backward_dq", "attention_backward_renormalize",
    "attention_backward_gather", *NO_PRODUCTS,
}  # fmt: skip
SINGLE = {"attention_forward_single", "attention_backward_single"}
WIDE = {"attention_backward_chunk", "attention_backward_chunk_sums"}
LOOPS = {
    **dict.fromkeys(("attention_backward_gather", "attention_backward_renormalize", *SINGLE), (1,)),
    "attention_backward_chunk": (2, 1, 0),
    "attention_backward_chunk_sums": (3,),
}
"""How many loops of a kernel multiply; else it is two, with and without a mask. ptxas may unroll those of a chunk."""


@cache
def offline(folder, *arguments, **variables):
    """The lines that offline.py prints, which may read what is compiled by the installed Triton's tool."""
    installed = Path(find_spec("triton").origin).parent
    tool = str(installed / "backends" / "nvidia" / "bin" / "cuobjdump")
    found = lines("triton/offline.py", *arguments, folder=folder, TILEWISE_CUOBJDUMP=tool, **variables)
    assert found
    return found


def name(row):
    """A kernel's name in the record."""
    return f"{row['kernel']} {row['dtype']} {row['D']} {row['variant']}"


def is_strict(target, row):
    """Whether the rule of no spills holds for a kernel."""
    # Triton 3.9 spills as much without a place; a tile that is a whole head has all its gradients in registers
    usual = row["variant"] not in ("strides of 1", "placed dropout", "single", "Swin")
    return usual and target in FREE_OF_SPILLS and row["dtype"] != "float32" and row["D"] <= 128


def faults(target, row, record):
    """What is wrong with a kernel, as sentences."""
    if "known" in row:
        return []
    if "error" in row:
        return [row["error"]]
    found = []
    limit = KIBIBYTES.get(target, 64) * 1024
    if row["shared"] > limit:
        found.append(f"{row['shared']} bytes of shared memory, the chip has {limit}")
    if row["tensor_memory"] > TENSOR_MEMORY_COLUMNS:
        found.append(f"{row['tensor_memory']} columns of tensor memory, the chip has {TENSOR_MEMORY_COLUMNS}")
    if row["kernel"] in NO_PRODUCTS:
        if row["matrix"]:
            found.append(f"uses {row['matrix']}, but multiplies no matrices")
        return found
    meant = BEST.get(target, MATRIX[target]) if is_strict(target, row) else MATRIX[target]
    wide = row["dtype"] == "float32" and row["D"] > 256
    if row["variant"] == "ieee" or (wide and not target.startswith("gfx9")):  # whose matrix units multiply fp32
        meant = set()
    if bool(row["matrix"]) != bool(meant) or not set(row["matrix"]) <= meant:
        found.append(f"uses the matrix instructions {row['matrix']}; meant are {sorted(meant)}")
    if row["dtype"] == "float32" and not meant and row["conflicts"]:
        found.append(f"reads {row['conflicts']} right factors across the banks of shared memory")
    loops = LOOPS.get(row["kernel"], (2,))
    if row["loops"] not in loops:
        found.append(f"has {row['loops']} loops that multiply, expected {loops}")
    allowed = 0 if is_strict(target, row) else record.get(name(row))
    if allowed is None:
        found.append(f"is not in {RECORD.name}; measure it by the command in CONTRIBUTING.md, for {target}")
    elif row["spills"] > allowed:
        found.append(f"{row['spills']} local loads and stores in a loop, allowed are {allowed}")
    return found


@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "release"), [(t, r) for t in MATRIX for r in RELEASES if r == "oldest" or t in WITH_BOTH]
)
def test_every_kernel_compiles_well(target, release):
    rows = offline(folder_of(release), "compile", target)
    version = rows[0]["triton"]
    if "refused" in rows[0]:
        pytest.skip(f"Triton {version} no longer compiles for {target}: {rows[0]['refused']}")
    record = json.loads(RECORD.read_text()).get(version, {}).get(target, {})
    single = SINGLE if target in ("sm_80", "sm_90", "sm_100") else set()
    wide = set() if target in ("sm_70", "sm_75", "sm_86") else WIDE
    assert {row["kernel"] for row in rows} == KERNELS | single | wide
    assert {row["variant"] for row in rows} >= {"plain", "combined", "listed"}
    assert {row["D"] for row in rows if row["dtype"] != "float32"} >= {64, 128}
    assert {row["D"] for row in rows if row["dtype"] == "float32"} >= {64}
    wrong = {name(row): faults(target, row, record) for row in rows}
    wrong = {kernel: found for kernel, found in wrong.items() if found}
    assert not wrong, "\n".join([f"Triton {version}, {target}:", *(f"{k}: {'; '.join(f)}" for k, f in wrong.items())])
    remember(version, f"triton/offline.py {target}", rows)


@pytest.mark.compile
@pytest.mark.parametrize("release", RELEASES)
def test_a_new_length_costs_no_compile_of_its_own(release):
    """Keys of kernels hold no length. Of a number in a NamedTuple Triton notes whether 16 divides it, and no more."""
    rows = offline(folder_of(release), "keys", "sm_90")
    keys, calls = defaultdict(set), defaultdict(int)
    for row in rows:
        for kernel, found in row["keys"].items():
            for position, key in enumerate(found):  # a call lists tiles up to three times, for tiles of other sizes
                at = row["variant"], row["D"], kernel, position
                keys[at].add(key)
                calls[at] += 1
    assert {variant for variant, *_ in keys} == {
        "full", "causal", "window", "padding", "documents", "dense", "bias", "varlen",
    }  # fmt: skip
    assert {kernel for _, _, kernel, _ in keys} == KERNELS - {"attention_backward_sink"}
    assert set(calls.values()) == {36}, "the lengths that were tried"
    for at, found in keys.items():
        programs = 2 if at[0] in ("dense", "bias") else 1  # a batch of 1 is read at 0
        assert len({re.sub(r"'D'|''", "_", key) for key in found}) <= programs, f"{at}: {found}"
        most = 2 if at[0] in ("full", "causal") else 16 if at[0] in ("documents", "dense") else 8
        assert len(found) <= most, f"{at}: {len(found)} kernels for 36 lengths"
    for variant, D, kernel, position in keys:
        if kernel != "attention_list_tiles":  # it knows no head size
            other = keys[variant, 144 - D, kernel, position]
            assert not keys[variant, D, kernel, position] & other, "another head size is another kernel"
    assert not keys["full", 64, "attention_forward", 0] & keys["causal", 64, "attention_forward", 0], (
        "another mask is another kernel"
    )


def test_every_loop_that_multiplies_is_found():
    """The reader of disassembly: a wait behind the loop belongs to it, and only innermost loops count."""
    spec = spec_from_file_location("offline", HERE / "offline.py")
    spec.loader.exec_module(reader := module_from_spec(spec))
    sass = """
        /*0000*/   MOV R1, c[0x0] ;
        /*0010*/   STL [R1], R2 ;
        /*0020*/   HMMA R4, R5 ;
        /*0030*/   @!P0 BRA 0x90 ;
        /*0040*/   LDL R2, [R1] ;
        /*0050*/   @P1 BRA 0x50 ;
        /*0060*/   @P2 BRA 0x20 ;
        /*0070*/   @P3 BRA 0x10 ;
        /*0080*/   EXIT ;
        /*0090*/   SYNCS.WAIT R7 ;
        /*00a0*/   @P4 BRA 0x90 ;
        /*00b0*/   BRA 0x40 ;
    """
    (body,) = reader.innermost_loops(sass, r"\bHMMA\b")
    assert body.count("LDL") == 1
    assert body.count("STL") == 0
    assert "SYNCS.WAIT" in body
    assert reader.innermost_loops(sass, r"\bHGMMA\b") == []


def measure(targets):
    """Writes the spills of these targets into the record, for every Triton there is, and the digests of all without
    another fault."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    folders = [None, *filter(None, [os.environ.get(NEWEST)])]
    for folder in folders:
        for target in targets:
            rows = offline(folder, "compile", target, **{ANEW: "1"})
            version = rows[0]["triton"]
            if "refused" in rows[0]:
                continue
            read = [row for row in rows if "spills" in row and row["kernel"] not in NO_PRODUCTS]
            kept = {name(row): row["spills"] for row in read if not is_strict(target, row)}
            record.setdefault(version, {})[target] = dict(sorted(kept.items()))
            found = [f"{key}: {spills}" for key, spills in kept.items() if spills]
            wrong = [f"{name(row)}: {why}" for row in rows if (why := faults(target, row, kept))]
            print(version, target, *found, *wrong, sep="\n  ", flush=True)
            if not wrong:
                remember(version, f"triton/offline.py {target}", rows)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    measure(sys.argv[1:] or list(MATRIX))
