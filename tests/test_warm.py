"""warm(): what it compiles is what calls ask for; and processes that start together compile each kernel once."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from command import call

import tilewise as tw

pytest.importorskip("triton", reason="kernels are Triton's")
module = importlib.import_module("tilewise.warm.warm")  # tw.warm is the function
SMALL = torch.empty(1, 80, 2, 16, dtype=torch.float16, device="meta")


def elsewhere(*arguments):
    """What tests/elsewhere.py prints."""
    command = [sys.executable, Path(__file__).with_name("elsewhere.py"), *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.compile
def test_what_is_foreseen_is_what_calls_ask_triton_for():
    found = elsewhere("keys")
    assert len(found) == 18
    for name, one in found.items():
        assert set(one["listed"]) == set(one["asked"]) == set(one["alone"]), name
    assert "attention_backward_fp32" in found["fp32"]["listed"].values()
    assert "attention_backward_gather" in found["combined triton"]["listed"].values()
    unforeseen = found["causal triton"]["unforeseen"]
    assert not unforeseen["other lengths"]
    assert not unforeseen["another batch size"]
    assert not unforeseen["q, k and v as parts of one tensor"]
    assert unforeseen["q, k or v off a 16-byte boundary"] == [
        f"attention_{name}" for name in ("backward_dkdv", "backward_dq", "forward")
    ]
    assert unforeseen["a gradient of lse (return_lse)"] == ["attention_backward_delta"]
    # whose last tile of keys is not full
    assert found["causal"]["unforeseen"]["other lengths"] == ["attention_backward"]
    assert found["causal"]["unforeseen"]["a gradient of o off a 16-byte boundary"] == ["attention_backward_preprocess"]


def test_a_warm_cache_saves_every_compilation_and_an_empty_one_all_but_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "warmed"))
    options = "--device sm_80 --q 1,80,2,16 --dtype fp16 --forward --processes 1 --json"
    result = call("warm", *options.split())
    assert result.status == 0, result.stderr
    assert result.stderr.splitlines() == ["looking for kernels", "kernel 1 of 1: attention_forward"]
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert kernel["name"] == "attention_forward"
    assert kernel["seconds"] > 0.0

    again = tw.warm(SMALL, SMALL, SMALL, device="sm_80", backward=False)
    assert [one.found for one in again.kernels] == [True]
    assert again.kernels[0].hash == kernel["hash"]
    assert str(again).splitlines()[1].split() == ["attention_forward", "found"]
    assert "q, k or v off a 16-byte boundary" not in again.unforeseen, "rows of 16 entries are copied then"

    found = elsewhere("ranks", str(tmp_path))
    (first_call,) = found["warmed"]
    assert first_call == {"compiled": [], "found": ["attention_forward"]}
    for name, finish, compile in (
        ("together", 8, 1), ("again", 2, 0), ("killed", 3, 1), ("unwritable", 2, 2), ("no locks", 2, 2),
    ):  # fmt: skip
        ends = [end for end in found[name] if end]
        compiled = Counter(kernel for end in ends for kernel in end["compiled"])
        assert len(ends) == finish, name
        late = name == "no locks"  # without them, a process compiles again what another has begun, not what it has done
        assert (2 if late else 2 * compile) <= compiled.total() <= 2 * compile, name
        assert all(len(end["compiled"]) + len(end["found"]) == 2 for end in ends), name
        assert all(bool(end["said"]) == (name == "unwritable") for end in ends), name
    assert "set TRITON_CACHE_DIR" in found["unwritable"][0]["said"][0]
    assert len(found["unwritable"][0]["said"]) == 1
    slow, impatient = found["stuck"]
    assert impatient["compiled"] == ["attention_backward_delta", "attention_backward_delta"]
    assert len(slow["compiled"] + slow["found"]) == 2


def test_calls_of_the_cpu_need_no_kernel():
    q = torch.zeros(1, 8, 2, 8)
    assert tw.warm(q, q, q).kernels == ()
    assert "nothing to compile" in str(tw.warm(q, q, q, more=[{"mask": tw.Causal()}]))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"processes": 0}, ValueError, "processes must be None or at least 1, got 0"),
        ({"mask": "causal", "device": "sm_90"}, TypeError, "mask must be a Mask"),
        ({"masks": tw.Causal(), "device": "sm_90"}, TypeError, r"got masks; did you mean mask\?"),
        ({"backend": "hopper", "device": "sm_80"}, tw.Unsupported, "written for sm_90"),
        ({"more": [{"dropout": 2.0}], "device": "sm_90"}, ValueError, "dropout must be"),
    ],
)
def test_wrong_arguments_are_named(options, error, says):
    with pytest.raises(error, match=says):
        tw.warm(SMALL, SMALL, SMALL, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which meta tensors mean then")
def test_meta_tensors_need_a_device_where_no_gpu_is():
    with pytest.raises(ValueError, match='PyTorch sees no GPU, got None; pass device="sm_90"'):
        tw.warm(SMALL, SMALL, SMALL)


def test_a_process_that_ends_is_an_error_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="the process that compiled it ended with exit status 1"):
        tw.warm(SMALL, SMALL, SMALL, device="sm_90")


def test_processes_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    for name in ("random", "torch", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r}); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])  # as `python -c` and `python -m` have it
    with module.Workers("sm_80") as workers:
        kernels, _ = workers.ask("list_kernels", module.call_of("sm_80", False, SMALL, SMALL, SMALL))
    assert [kernel.name for kernel in kernels] == ["attention_forward"]
    assert not marker.exists()


def test_kernels_that_do_not_compile_are_named_when_the_others_are_done(monkeypatch):
    done = []

    def ask(self, request, call, hash=None):
        if request == "list_kernels":
            return [module.Kernel(name, name, name == "there") for name in ("good", "there", "bad", "fine")], {}
        if hash == "bad":
            raise RuntimeError("CompilationError: no")
        done.append(hash)
        return 1.0

    monkeypatch.setattr(module.Workers, "ask", ask)
    with pytest.raises(RuntimeError, match=r"1 of 3 kernels did not compile; .*\nbad: CompilationError: no"):
        tw.warm(SMALL, SMALL, SMALL, device="sm_90", processes=1)
    assert done == ["good", "fine"]


def test_further_calls_differ_in_their_options(monkeypatch):
    seen = []

    def ask(self, request, call, hash=None):
        if request == "list_kernels":
            seen.append(call)
            return [module.Kernel("forward", "one", True)], {"other lengths": {"one": "forward", "two": "backward"}}
        return None

    monkeypatch.setattr(module.Workers, "ask", ask)
    options = "--device sm_90 --q 2,64,4,16 --bias 1,4,64,64"
    also = ["--also", "--mask causal --q 1,32,4,16 --bias 1,4,32,32", "--also", "--kv-heads 2"]
    result = call("warm", *options.split(), *also)
    assert result.status == 0, result.stderr
    assert [(one.problem.B, one.problem.M, one.problem.H_k) for one in seen] == [(2, 64, 4), (1, 32, 4), (2, 64, 2)]
    assert [one.problem.recipe.mask for one in seen] == [(), (("Causal",),), ()]
    assert all(one.wanted == (True,) for one in seen)
    assert result.stdout.splitlines()[1].split() == ["forward", "found"]
    assert result.stdout.splitlines()[-1].split() == ["other", "lengths", "backward"]
    wrong = call("warm", "--device", "sm_90", "--also", "--causal")
    assert wrong.status == 2
    assert "--causal" in wrong.stderr


def test_the_command_tells_what_went_wrong_in_a_sentence(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    result = call("warm", "--device", "sm_90")
    assert result.status == 1
    assert "ended with exit status 1" in result.stderr
    assert "Traceback" not in result.stderr
