"""A process's first training step: its gradient compiles beside its forward, and other sizes and processes nothing."""

import inspect
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FunctionType

import pytest
from scripts import ROOT, lines

pytest.importorskip("triton")
import triton
from triton import __version__, knobs
from triton.backends.nvidia import driver
from triton.language import constexpr
from triton.runtime import cache, jit

from tilewise.call import shortcuts
from tilewise.call.backend import launch_module, load
from tilewise.call.shortcuts import know_triton, quick_sources, source_lines
from tilewise.hopper.forward.kernel import attention_forward
from tilewise.hopper.parts import dropout_bits
from tilewise.host import compile_once

PASSES = {
    "forward": ["attention_forward"],
    "backward": ["attention_backward_preprocess", "attention_backward", "attention_backward_postprocess"],
}


BROADCAST = ("bias", "dense", "bias triton")
"""Calls whose tensor may broadcast: a dimension of size 1 is read at 0, so a single head is another kernel."""
OF_LSE = ("attention_decode", "attention_combine")
"""Their stride of lse's batch entries is the number of heads, and a 1 is a key."""
SHORT_OF_REGISTERS = ("attention_backward_fp32",)
"""Their counts are keys: ptxas spills in their loops where they first decode them from 2 n + 1."""


KERNEL = re.compile(
    r"^@(?:triton|gluon)\.jit(?:\(.*\))?\ndef (attention_\w+|cache_append|rotary_embedding)\(", re.MULTILINE
)


def first(*arguments: str, cache: Path | None = None) -> list[dict]:
    """What first.py prints in a process of its own."""
    found = {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    return lines("host/first.py", *arguments, OMP_NUM_THREADS="1", **found)


@pytest.mark.compile
def test_other_lengths_batches_and_heads_compile_nothing_within_a_row_of_tiles():
    """Each kernel of a call is compiled once for each set of constants; counts of 1 and multiples of 16 are no keys."""
    counted = first("count")
    assert {line["call"] for line in counted} >= {"full 128", "causal 128", "varlen", "bias", "fp16x3", "int8 triton"}
    for line in counted:
        assert line["sizes"] > 500 if line["call"] in ("full 128", "causal 128") else line["sizes"] > 30, line
        for kernel, (compiled, rows) in line["kernels"].items():
            if kernel in SHORT_OF_REGISTERS:
                assert compiled <= 5 * rows, f"{line['call']}: {kernel} is compiled {compiled} times for {rows} rows"
                continue
            most = 2 * rows + 2 if line["call"] in BROADCAST else rows + (kernel in OF_LSE)
            assert rows <= compiled <= most, f"{line['call']}: {kernel} is compiled {compiled} times for {rows} rows"
    causal = next(line["kernels"] for line in counted if line["call"] == "causal 128")
    assert set(causal) == {*PASSES["forward"], *PASSES["backward"]}


@pytest.mark.compile
def test_every_kernel_is_built_for_counts_of_1_and_without_keys():
    built = first("ones")
    failed = [line for line in built if "error" in line]
    assert not failed
    kernels = {line["kernel"].removeprefix("tilewise.") for line in built}
    assert {kernel.rpartition(".")[2] for kernel in kernels} == {
        name for file in (ROOT / "src" / "tilewise").rglob("*.py") for name in KERNEL.findall(file.read_text())
    }
    assert kernels >= {f"{folder}.attention_{name}" for folder, name in (
        ("triton.forward", "forward"), ("hopper.forward.kernel", "forward"),
        ("triton.split_keys.kernel", "decode"), ("hopper.split_keys.kernel", "decode"),
    )}  # fmt: skip


@pytest.mark.compile
@pytest.mark.skipif(not knobs.runtime.interpret, reason="a GPU's own driver is there: see tests/card")
@pytest.mark.skipif(not any(os.access(Path(p, "cc"), os.X_OK) for p in os.get_exec_path()), reason="no C compiler")
def test_a_first_step_compiles_each_kernel_once_and_later_processes_find_them(tmp_path):
    """All of it but the GPU: Triton's loader and launchers meet a driver that does nothing."""
    begun, again = (first("step", "2048", "777", cache=tmp_path) for _ in range(2))
    for printed in (begun, again):
        steps = [line for line in printed if "length" in line]
        assert [(line["length"], line["part"]) for line in steps] == [(n, p) for n in (2048, 777) for p in PASSES]
        assert all(line["launched"] == len(PASSES[line["part"]]) for line in steps)
        assert not [line for line in steps[2:] if line["compiled"] or line["found"]], "another length compiles nothing"
    every = PASSES["forward"] + PASSES["backward"]
    assert sorted(begun[2]["compiled"] + begun[3]["compiled"]) == sorted(every), "each once, by whichever thread"
    assert set(begun[2]["compiled"] + begun[2]["found"]) & set(PASSES["backward"]), "beside the forward"
    for line in again[2:4]:
        assert (line["found"], line["compiled"]) == (PASSES[line["part"]], [])
    assert begun[-1]["packed"] == [True] * len(every), "packed arguments are launched in half the time"
    assert begun[-1]["hashed"]
    assert not again[-1]["hashed"], "Triton's hash of its own 400 MB is kept"


def device_functions() -> Iterator[FunctionType]:
    """Each device function of the package."""
    for name in ("triton", "hopper"):
        assert load(name).name == name
    for name in ("hopper.fp32", "hopper.split_keys", "quantize", "append", "merge", "rotary"):
        assert launch_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("tilewise."):
            for each in vars(module).values():
                fn = getattr(each, "fn", None)
                if isinstance(fn, FunctionType) and fn.__module__ == name:
                    yield fn


def test_sources_are_those_that_inspect_finds():
    functions = list(device_functions())
    assert len(functions) > 400
    for fn in functions:
        assert source_lines(fn) == inspect.getsourcelines(fn), fn


def test_sources_of_others_functions_are_left_to_inspect(monkeypatch):
    monkeypatch.setattr(inspect, "getsourcelines", lambda fn: (["theirs"], 7))
    assert source_lines(test_sources_are_those_that_inspect_finds) == (["theirs"], 7)


def test_triton_sees_them_while_the_package_is_imported_and_no_longer():
    with quick_sources():
        assert jit.inspect.getsourcelines is source_lines
        assert jit.inspect.signature is inspect.signature
    assert jit.inspect is inspect
    with pytest.raises(ZeroDivisionError), quick_sources():
        raise ZeroDivisionError
    assert jit.inspect is inspect


NOT_IMPORTED = (
    "tilewise.hopper.fp32.", "tilewise.hopper.split_keys.kernel", "tilewise.hopper.split_keys.launch",
    "tilewise.host.split", "tilewise.quantize.kernel", "tilewise.quantize.launch", "tilewise.rotary.kernel",
    "tilewise.rotary.launch", "tilewise.append.kernel", "tilewise.append.launch", "tilewise.merge.kernel",
    "tilewise.merge.launch", "tilewise.triton.", "tilewise.cpu.",
)  # fmt: skip
"""Modules of other calls' kernels."""


def test_a_16_bit_step_imports_no_other_kernels():
    before, forward, backward = first("modules")
    assert [name for name in before["modules"] if ".kernel" in name or ".launch" in name] == []
    brought = forward["modules"] + backward["modules"]
    assert {"tilewise.hopper.forward.kernel", "tilewise.hopper.backward.kernel"} <= {*brought}
    assert [name for name in brought if f"{name}.".startswith(NOT_IMPORTED)] == []


def test_a_launcher_built_in_another_cache_keeps_the_type_of_descriptors(tmp_path):
    """torch.compile moves Triton's cache. What loads Triton's driver from there gives descriptors a second type, which
    launchers built before refuse."""
    [found] = first("moved", cache=tmp_path)
    assert found["kept"]
    assert found["built"] == (["source"] if hasattr(driver, "compile_module_from_src") else [])


def test_kept_hashes_are_those_of_triton_and_nothing_is_parsed_for_them(tmp_path):
    found = first("hashes", cache=tmp_path)
    assert len({line["call"] for line in found}) > 20
    assert [line for line in found if not line["equal"] or line["parsed"] or line["missed"]] == []


def test_a_source_its_line_and_a_constant_each_have_other_hashes(monkeypatch):
    functions = [*compile_once.reached([attention_forward], {}).values()]
    keys = [compile_once._key(functions)]
    for of, name, value in (
        (dropout_bits, "TILES_AHEAD", constexpr(5)), (functions[0], "_src", "def f(): pass"),
        (functions[1], "starting_line_number", 1),
    ):  # fmt: skip
        monkeypatch.setattr(of, name, value)
        keys.append(compile_once._key(functions))
    assert len({*keys}) == 4


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """Triton's hash of itself, as if nobody had asked for it: a function that makes it slow again, and what it is."""
    calls = []
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))

    def forget(value=f"{__version__}-hash"):
        monkeypatch.setattr(cache, "triton_key", lru_cache(lambda: calls.append(value) or value))

    forget()
    return forget, calls


def test_the_hash_is_computed_once_for_all_processes(slow):
    forget, calls = slow
    for _ in range(3):
        know_triton()
        assert cache.triton_key() == f"{__version__}-hash"
        forget()
    assert len(calls) == 1


@pytest.mark.parametrize("what", ["another Triton", "a file that is none"])
def test_the_hash_is_computed_again_for(what, slow, monkeypatch):
    forget, calls = slow
    know_triton()
    if what == "another Triton":
        monkeypatch.setattr(shortcuts, "stamp_of_triton", lambda: "changed")
    else:
        (kept,) = Path(knobs.cache.dir).iterdir()
        kept.write_text("")
    forget(f"{__version__}-other")
    know_triton()
    assert cache.triton_key() == f"{__version__}-other"
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_keeps_nothing(slow, tmp_path):
    (tmp_path / "cache").touch()
    know_triton()
    assert cache.triton_key() == f"{__version__}-hash"


def test_the_stamp_changes_with_each_file_that_triton_hashes(tmp_path, monkeypatch):
    for name in (
        "runtime/cache.py",
        "_C/libtriton.so",
        "compiler/a.py",
        "backends/x/b.py",
        "language/c.py",
        "nvidia/bin/ptxas",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "__init__.py"))
    stamp = shortcuts.stamp_of_triton.__wrapped__
    seen = {stamp()}
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        file.write_text("22")
        seen.add(stamp())
    assert len(seen) == 6
