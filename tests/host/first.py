"""A process's first training step, on a GPU or without one: the kernels it compiles, and how long its parts take.

Without a GPU all of it is real but what the GPU does: Triton's loader and launchers meet a libcuda whose functions
succeed and do nothing. That needs a C compiler. Run it in a process of its own, with TRITON_INTERPRET=0:

    python tests/host/first.py step 2048 777     a step of each length: seconds, and kernels compiled, found, launched;
                                                 FIRST_D=64 is another head size
    python tests/host/first.py count             for each of `calls`: its kernels over all of SIZES, without compiling
    python tests/host/first.py modules           the package's modules that a step's passes import, without launching
    python tests/host/first.py hashes            whether the hashes of kernels that are kept are those of Triton
    python tests/host/first.py moved             whether building a launcher in another cache changes descriptors
    python tests/host/first.py ones              with every count 1, or no keys: the kernels, and what fails to build
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import cycle, product
from pathlib import Path
from typing import Any

DRIVER = """
#include <stddef.h>
#include <stdint.h>
static int context, launched;
int launches(void) { return launched; }
int cuLaunchKernelEx(void* config, void* function, void** given, void* extra) { launched++; return 0; }
int cuCtxGetCurrent(void** p) { *p = &context; return 0; }
int cuDeviceGetAttribute(int* p, int attribute, int device) { *p = 227 << 10; return 0; }
int cuFuncGetAttribute(int* p, int attribute, void* function) { *p = 1024; return 0; }
int cuPointerGetAttribute(uint64_t* p, int attribute, uint64_t address) { *p = address; return 0; }
int cuGetErrorString(int code, const char** text) { *text = "no driver"; return 0; }
#define NOTHING(name) int name(void) { return 0; }
int cuDriverGetVersion(int* p) { *p = 13000; return 0; }
NOTHING(cuCtxGetDevice) NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuDeviceGet)
NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuLaunchKernel)
NOTHING(cuModuleGetFunction) NOTHING(cuModuleLoadData) NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuStreamIsCapturing) NOTHING(cuTensorMapEncodeTiled)
"""
BEGUN = time.perf_counter()
HEADS, D = (32, 8), int(os.environ.get("FIRST_D", "128"))
LENGTHS = (2, 33, 64, 65, 128, 200, 256, 300, 512, 513, 640, 777, 1000, 1024, 1025, 1536, 2000, 2048)
SIZES = [(M, N) for M in LENGTHS for N in (M, M + 16)]
"""36 pairs of lengths. Some are multiples of every tile; of some a count of tiles is 1."""
BATCHES = (1, 2, 3, 16)
RATIOS = ((1, 1), (4, 4), (8, 2), (16, 1))
"""Heads of queries and of keys."""
BUILT = (
    "causal 64", "causal 256", "padding", "spans", "varlen", "alibi", "bias", "dense", "dropout", "sink",
    "deterministic", "int8", "fp8", "bf16x6", "fp16x3",
)  # fmt: skip
"""Calls of Hopper's kernels that are built for counts of 1, besides all of the portable ones."""
PAGE = 16
"""Rows of a page of a cache."""
ALL = ("full 128", "causal 128")
"""Calls that are counted in every batch and ratio; the others take turns, size by size."""


def no_driver() -> Any:
    """Build and load a libcuda that does nothing, and return it."""
    folder = tempfile.mkdtemp()
    source = Path(folder, "driver.c")
    source.write_text(DRIVER)
    library = source.with_name("libcuda.so.1")
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def pretend() -> Any:
    """Make Triton's own loader and launchers meet that libcuda, as on an H100."""
    loaded = no_driver()
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from tilewise.warm.cross_compile import TargetDriver, gpu_target

    class Idle(TargetDriver):
        """A driver of a GPU that is not here. It loads and launches, and nothing runs."""

        launcher_cls = nvidia.CudaLauncher

        @cached_property
        def utils(self) -> Any:
            return nvidia.CudaUtils()

        def get_current_target(self) -> Any:
            self.utils  # noqa: B018, before the first launcher, as in Triton's driver
            return self.target

    driver.set_active(idle := Idle(gpu_target("sm_90")))  # type: ignore[arg-type]
    with suppress(OSError):  # a cache that cannot be written
        idle.utils  # noqa: B018
    return loaded


def step(*lengths: str) -> Iterator[dict[str, Any]]:
    """Take a training step of each length; at the end, tell whether Triton has hashed its own files, the kernels whose
    source it has read, and those that a bundle gave."""
    import torch

    on_gpu = torch.cuda.is_available()
    yield {"part": "import torch", "seconds": since(BEGUN)}
    begin = time.perf_counter()
    if on_gpu:  # PyTorch imports SymPy for its first backward
        x = torch.ones(1, device="cuda", requires_grad=True)
        x.backward(torch.ones_like(x))
    loaded = None if on_gpu else pretend()
    from triton import knobs

    seen: dict[str, list[str]] = {"compiled": [], "found": []}

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        seen["found" if cache_hit else "compiled"].append(src.name)

    knobs.compilation.listener = listen
    read, unpacked = watch()
    from triton.runtime import cache

    hash_triton = cache.triton_key
    yield {"part": "driver", "seconds": since(begin)}
    taken: dict[str, Any] = {}
    for length in map(int, lengths):
        for part, run in passes(length, on_gpu, taken):
            begin, before = time.perf_counter(), loaded.launches() if loaded else 0
            run()
            if on_gpu:
                torch.cuda.synchronize()
            launched = loaded.launches() - before if loaded else None
            yield {"part": part, "length": length, "seconds": since(begin), **seen, "launched": launched}
            seen |= {"compiled": [], "found": []}
    hashed = hash_triton.cache_info().currsize > 0
    made = {"hashed": hashed, "read": read, "unpacked": unpacked}
    yield {"part": "end", **made, "packed": on_gpu or list(packed_launches(taken["p"]))}


def packed_launches(p: Any) -> Iterator[bool]:
    """Tell of each launch of a step that was taken whether its arguments can be packed, for the driver itself."""
    from tilewise.hopper.plan import plan
    from tilewise.host import packed, replay

    for kept in plan(p).replays.values():
        for direct, given, fills in kept.launches[1] if kept.launches else ():
            launch, *_ = replay._launcher(direct, replay._filled(given, fills, range(16, 1024, 16)))
            yield launch is packed.driver()


def watch() -> tuple[list[str], list[str]]:
    """Return lists that get the names of kernels whose source Triton reads, and of those that a bundle gives."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.host import compile_once

    read: list[str] = []
    unpacked: list[str] = []
    for kind in (ASTSource, GluonASTSource):

        def make_ir(self: Any, *given: Any, whole: Any = kind.make_ir, **more: Any) -> Any:
            """Note it."""
            read.append(self.name)
            return whole(self, *given, **more)

        kind.make_ir = make_ir
    whole = compile_once.unpack

    def unpack(key: str, name: str, compile: Any) -> bool:
        """Note what a bundle has."""
        found = whole(key, name, compile)
        unpacked.extend([name] * found)
        return found

    compile_once.unpack = unpack
    return read, unpacked


def passes(length: int, on_gpu: bool, made: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the forward of a causal call, and its backward, as functions, which put what they make into `made`. What
    they need is imported by the first."""
    import torch

    device = "cuda" if on_gpu else "cpu"
    q, k, v = (torch.zeros(4, length, H, D, dtype=torch.bfloat16, device=device) for H in (HEADS[0], *HEADS[1:] * 2))

    def forward() -> None:
        import tilewise as tw

        if on_gpu:
            x = [t.requires_grad_() for t in (q, k, v)]
            made["o"] = tw.attention(*x, mask=tw.Causal(), backend="hopper")
            return

        from tilewise.call.backend import FORWARD, planned, while_compiling

        made["p"], made["x"] = problem_of(q, k, v, mask=tw.Causal(), backend="hopper")
        plan = planned(made["p"], FORWARD)
        with while_compiling(lambda: plan.ahead(())):
            made["saved"] = plan.run(made["x"], None)

    def backward() -> None:
        if on_gpu:
            made["o"].backward(torch.ones_like(made["o"]))
            return
        from tilewise.call.backend import BACKWARD, planned

        p, x, saved = made["p"], made["x"], made["saved"]
        planned(p, BACKWARD).run(x, saved, torch.zeros_like(saved.o), None)

    yield "forward", forward
    yield "backward", backward


def problem_of(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Return a call as an H100 would see it, and its operands."""
    from tilewise.attention.api import with_defaults
    from tilewise.attention.explain import problem_on
    from tilewise.call.check import check_arguments

    given = with_defaults("first", options)
    del given["return_lse"], given["seed"]
    x, *rest = check_arguments(q, k, v, **given)
    return problem_on(x, *rest, "sm_90"), x


def calls(B: int, M: int, N: int, H: int) -> dict[str, dict[str, Any]]:
    """Return the options of each call that is counted; D and dtype are of its tensors."""
    import torch

    import tilewise as tw

    def of(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    ends, lengths = of(B + 1, dtype=torch.int32), of(B, dtype=torch.int32)
    bf16, slopes = torch.bfloat16, of(H)
    causal = {"mask": tw.Causal()}
    hopper: dict[str, dict[str, Any]] = {
        **{f"full {D}": {"D": D} for D in (64, 128, 256)},
        **{f"causal {D}": {"D": D, **causal} for D in (64, 128, 256)},
        "window": {"mask": tw.Window(100, 0)},
        "padding": {"mask": tw.Padding(lengths)},
        "spans": {"mask": tw.Spans(of(B, M, dtype=torch.int32), of(B, M, dtype=torch.int32))},
        "varlen": {**causal, "layout": tw.Varlen(ends, ends, M, N)},
        "softcap": {**causal, "score": tw.SoftCap(30.0)},
        "alibi": {**causal, "score": tw.Alibi(slopes)},
        "bias": {"score": tw.Bias(of(B, H, M, N, dtype=bf16)), "wanted": (True,)},
        "documents": {"mask": tw.Documents(of(B, M, dtype=torch.int32), of(B, N, dtype=torch.int32))},
        "dense": {"mask": tw.Dense(of(B, H, M, N, dtype=torch.bool))},
        "dropout": {**causal, "dropout": 0.1},
        "sink": {**causal, "sink": slopes, "wanted": (True,)},
        "deterministic": {**causal, "deterministic": True},
        "wide": {**causal, "out_dtype": torch.float32},
        "int8": {**causal, "precision": "int8"},
        "fp8": {**causal, "precision": "fp8"},
        "bf16x6": {**causal, "dtype": torch.float32, "precision": "bf16x6"},
        "fp16x3": {**causal, "dtype": torch.float32, "precision": "fp16x3"},
        "decode": {"layout": tw.Cached(lengths)},
        "decode pages": {"layout": tw.Cached(lengths, of(B, -(-N // PAGE), dtype=torch.int32))},
    }
    portable = (
        "full 128", "causal 64", "window", "varlen", "bias", "documents", "dropout", "int8", "fp8", "bf16x6", "decode",
        "decode pages",
    )  # fmt: skip
    found = {name: {"D": 64, "dtype": bf16, "backend": "hopper", **given} for name, given in hopper.items()}
    return found | {f"{name} triton": found[name] | {"backend": "triton"} for name in portable}


def count() -> Iterator[dict[str, Any]]:
    """Count, for each call, the kernels that all its sizes compile, and the rows of tiles that they take."""
    from triton.runtime._async_compile import active_mode

    from tilewise.warm.cross_compile import use_target

    use_target("sm_90")
    submitted: list[str] = []

    class Recorder:
        def submit(self, key: str, *_: Any) -> None:
            """Note a kernel that no call before has asked for."""
            submitted.append(key)

    names = [*calls(1, 2, 2, 1), "append", "append pages"]
    token = active_mode.set(Recorder())  # type: ignore[arg-type]
    for name in names:
        turns = zip(SIZES, cycle(BATCHES), cycle(RATIOS[:3] + RATIOS[1:] + RATIOS[::-1]), strict=False)
        every = product(SIZES, BATCHES, RATIOS) if name in ALL else turns
        kernels: dict[str, set[str]] = {}
        rows: dict[str, set[str]] = {}
        sizes = 0
        for size, B, heads in every:
            found = launches(name, B, *size, *heads)
            sizes += bool(found)
            for launch in found:
                kernel = launch.kernel.fn.__name__
                submitted.clear()
                launch.compile()
                kernels.setdefault(kernel, set()).update(submitted)
                rows.setdefault(kernel, set()).add(repr((launch.constants, list(alignments(launch.arguments)))))
        counted = {kernel: [len(keys), len(rows[kernel])] for kernel, keys in kernels.items()}
        yield {"call": name, "sizes": sizes, "kernels": counted}
    active_mode.reset(token)


def launches(name: str, B: int, M: int, N: int, H: int, H_k: int) -> Any:
    """Return the launches of a call and of its gradient; with a cache those of one query a sequence, or of what
    appends to it."""
    import torch

    from tilewise.values.cached import Cached
    from tilewise.values.value import Unsupported
    from tilewise.warm.precompile import launches as recorded
    from tilewise.warm.warm import Call

    if name.startswith("append"):
        return appending(name, B, M, N, H_k)
    options = calls(B, M, N, H)[name]
    dtype, D, wanted = options.pop("dtype"), options.pop("D"), options.pop("wanted", ())
    rows: Any = ((B * M,), (B * N,)) if "layout" in options else ((B, M), (B, N))
    if caches := isinstance(options.get("layout"), Cached):
        rows = (B, 1), (B, N) if options["layout"].table is None else (options["layout"].table.numel(), PAGE)
    q, k = (torch.empty((*of, heads, D), dtype=dtype, device="meta") for of, heads in zip(rows, (H, H_k), strict=True))
    p, x = problem_of(q, k, k, **options)
    try:
        return recorded(Call(p, None if caches else wanted or (False,) * len(x.extra)))
    except Unsupported:
        return []


def appending(name: str, B: int, M: int, N: int, H_k: int) -> Any:
    """Return the launch that appends M rows to a cache of N."""
    import torch

    from tilewise.append import launch as append
    from tilewise.append.in_torch import Append
    from tilewise.values.cached import Cached

    def of(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = -(-N // PAGE)
    table = of(B, pages, dtype=torch.int32) if name == "append pages" else None
    cache = of(B, N, H_k, 64) if table is None else of(B * pages, PAGE, H_k, 64)
    new = of(B, M, H_k, 64)
    return append.launches(Append(cache, cache, new, new, Cached(of(B, dtype=torch.int32), table)), None, {})


def modules() -> Iterator[dict[str, Any]]:
    """Tell which modules of the package are imported before a step, by its forward, and by its backward."""
    import torch

    import tilewise as tw

    def imported() -> set[str]:
        return {name for name in sys.modules if name.startswith("tilewise.")}

    q, k, v = (torch.empty(4, 2048, H, D, dtype=torch.bfloat16, device="meta") for H in (HEADS[0], *HEADS[1:] * 2))
    p, x = problem_of(q, k, v, mask=tw.Causal(), backend="hopper")
    seen = imported()
    yield {"part": "before", "modules": sorted(seen)}

    from tilewise.call.backend import BACKWARD, FORWARD, load, planned

    load("hopper")
    from tilewise.host.launch import RECORDED

    RECORDED.set([])
    saved = planned(p, FORWARD).run(x, None)
    yield {"part": "forward", "modules": sorted(imported() - seen)}
    seen = imported()
    planned(p, BACKWARD).run(x, saved, torch.empty_like(q), None)
    yield {"part": "backward", "modules": sorted(imported() - seen)}


def hashes() -> Iterator[dict[str, Any]]:
    """Hash each kernel of many calls with all that it calls: as Triton does, then as a later process, which parses
    nothing. Name what Triton reaches that we do not."""
    from triton.runtime.jit import DependenciesFinder, JITCallable

    from tilewise.host.compile_once import hash_in_order, reached
    from tilewise.warm.cross_compile import use_target

    use_target("sm_90")
    parsed: list[str] = []
    called: list[Any] = []
    parse, update = JITCallable.parse, DependenciesFinder._update_hash
    JITCallable.parse = lambda fn: parsed.append(fn.__name__) or parse(fn)  # type: ignore[method-assign]
    DependenciesFinder._update_hash = lambda own, fn: called.append(fn) or update(own, fn)
    for name in calls(1, 1, 1, 1):
        for launch in launches(name, 2, 256, 256, 4, 2):
            values = launch.kernel, launch.arguments
            functions = reached(values, {})
            seen = []
            for _ in range(2):
                parsed.clear()
                for fn in functions.values():
                    fn.hash, fn.used_global_vals = None, {}
                hash_in_order(*values)
                seen.append([(fn.hash, sorted(fn.used_global_vals)) for fn in functions.values()])
            ours = [fn for fn in called if not f"{fn.__module__}.".startswith("triton.")]
            missed = sorted({fn.__name__ for fn in ours if id(fn) not in functions})
            called.clear()
            equal = seen[0] == seen[1]
            yield {"call": name, "functions": len(functions), "equal": equal, "parsed": parsed, "missed": missed}


def moved() -> Iterator[dict[str, Any]]:
    """Build a launcher after the cache has moved, as torch.compile moves it. Tell whether TMA descriptors have kept
    their type: launchers built before take no other."""
    from types import SimpleNamespace

    pretend()
    from triton.backends.nvidia import driver as nvidia

    from tilewise.host.ahead import build_launcher

    before = nvidia.PyCUtensorMap
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        built: list[Any] = []
        nvidia.CudaLauncher = lambda src, metadata: built.append(src)
        build_launcher(SimpleNamespace(src="source", metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda"))))
        yield {"built": built, "kept": nvidia.PyCUtensorMap is before is not None}


def ones() -> Iterator[dict[str, Any]]:
    """Build the IR of every kernel for counts of 1, and where there are no keys. Tell which were built, what failed.

    A count that Triton has made a constant has no type there. No machine code is made.
    """
    from tilewise.warm.cross_compile import use_target

    use_target("sm_90")
    names = [name for name in calls(1, 1, 1, 1) if name in BUILT or name.endswith("triton")]
    sizes = [(name, least(name), N) for name in names for N in (least(name), 0)]
    named = [(f"{name}, {N} keys", lambda name=name, M=M, N=N: launches(name, 1, M, N, 1, 1)) for name, M, N in sizes]
    portable = [(name, least(name), N) for name, _, N in sizes if name.endswith("triton")]
    named += [
        (f"{name} of any length", lambda name=name, M=M, N=N: of_any_length(name, M, N)) for name, M, N in portable
    ]
    for name, given in [*named, *of_caches(), *of_wide(), *of_others()]:
        for launch in given():
            kernel = launch.kernel
            row = {"call": name, "kernel": f"{kernel.fn.__module__}.{kernel.fn.__name__}"}
            kernel.compile = build_ir
            try:
                launch.compile()
            except Exception as error:
                row["error"] = str(error)[-400:]
            yield row


def of_any_length(name: str, M: int, N: int) -> Any:
    """Return the launches of a call of one head without those of heads of one tile."""
    from tilewise.triton.single import launch as single

    fits, single.fits = single.fits, lambda *_: False
    try:
        return launches(name, 1, M, N, 1, 1)
    finally:
        single.fits = fits


def least(name: str) -> int:
    """Return the least length that a call's kernels take: Hopper's take two, which are one tile."""
    return 1 if name.endswith("triton") else 2


def build_ir(src: Any, target: Any, options: dict[str, Any]) -> Any:
    """Build a kernel's IR, in place of triton.compile."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    parsed = backend.parse_options({**options, **src.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    parts = backend.get_codegen_implementation(parsed), backend.get_module_map()
    return src.make_ir(target, parsed, *parts, context)


def of_caches() -> Iterator[tuple[str, Any]]:
    """Yield calls with a cache of one page, and functions that return their launches: one query of one head."""
    import torch

    import tilewise as tw
    from tilewise.warm.precompile import launches as recorded
    from tilewise.warm.warm import Call

    def of(*shape: int, dtype: Any = torch.int32) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    def found(page: int, **options: Any) -> Any:
        q, k = of(*options.pop("q", (1, 1)), 1, 64, dtype=torch.bfloat16), of(1, page, 1, 64, dtype=torch.bfloat16)
        p, _ = problem_of(q, k, k, mask=tw.Causal(), **options)
        return recorded(Call(p, None))

    ends = of(2)
    for backend, page in (("triton", 1), ("triton", 4096), ("hopper", 4096)):
        for name, cached in (
            ("lengths", tw.Cached(of(1))),
            ("pages", tw.Cached(of(1), of(1, 1))),
            ("packed", tw.Cached(of(1), of(1, 1), cu_q=ends, max_q=1)),
        ):
            q = {"q": (1,)} if name == "packed" else {}
            yield (
                f"{name} of {page} {backend}",
                lambda page=page, layout=cached, backend=backend, q=q: found(page, layout=layout, backend=backend, **q),
            )


def of_wide() -> Iterator[tuple[str, Any]]:
    """Yield a call above head size 256 of one query, with one key and without."""
    import torch

    from tilewise.warm.precompile import launches as recorded
    from tilewise.warm.warm import Call

    for N in (1, 0):
        q, k = (torch.empty(1, n, 1, 320, dtype=torch.bfloat16, device="meta") for n in (1, N))
        p = problem_of(q, k, k, backend="triton")[0]
        yield f"head size 320, {N} keys", lambda p=p: recorded(Call(p, ()))


def of_others() -> Iterator[tuple[str, Any]]:
    """Yield the other operations: appending to a cache, merging parts, and rotating one head of one token."""
    import torch

    from tilewise.append import launch as append
    from tilewise.append.in_torch import Append
    from tilewise.host.launch import Launch
    from tilewise.merge import launch as merge
    from tilewise.rotary import launch as rotary
    from tilewise.rotary.in_torch import Rotation
    from tilewise.values.cached import Cached

    def of(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, table, lse = of(1, 1, 1, 64), of(1, 32), of(1, 1, 1, dtype=torch.float32)
    lengths = of(1, dtype=torch.int32)
    for name, layout in (("row", Cached(lengths)), ("page", Cached(lengths, of(1, 1, dtype=torch.int32)))):
        for tables in ({}, {"cos": table, "sin": table}):
            call = Append(x, x, x, x, layout, q=x, **tables)
            yield f"append a {name}", lambda call=call: append.launches(call, torch.empty_like(x), {})
    yield "merge", lambda: [merge.merge_launch(x, lse, [(x, lse)], {})]

    def rotated(shape: tuple[int, ...], cu_seqlens: Any = None) -> list[Any]:
        found: list[Any] = []
        kernel = rotary.rotary_embedding

        class Noted:
            def __getitem__(self, grid: Any) -> Any:
                """Note the arguments of a launch."""
                return lambda *arguments, enable_fp_fusion, **constants: found.append(
                    Launch(kernel, 1, arguments, constants, {})
                )

        rotary.rotary_embedding = Noted()  # type: ignore[assignment]
        rotary.launch([of(*shape)], Rotation(table, table, None, cu_seqlens, 0, False))
        rotary.rotary_embedding = kernel
        return found

    yield "rotary", lambda: rotated((1, 1, 1, 64))
    yield "rotary, packed", lambda: rotated((1, 1, 64), cu_seqlens=of(2, dtype=torch.int32))


def alignments(given: Any) -> Iterator[Any]:
    """Yield what Triton notes of the numbers that masks and scores hold: strides, and sizes of windows."""
    if hasattr(given, "captured"):
        yield [(n == 1, n % 16 == 0) for n in given.captured if isinstance(n, int)]
    elif isinstance(given, tuple):
        for each in given:
            yield from alignments(each)


def since(begin: float) -> float:
    """Return the seconds since then."""
    return round(time.perf_counter() - begin, 3)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    for line in {each.__name__: each for each in (step, count, modules, hashes, moved, ones)}[command](*rest):
        print(json.dumps(line), flush=True)
