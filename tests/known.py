"""Compile what is new. The folder known/ keeps a digest of each kernel's IR that was compiled and read without a fault.

Machine code follows from the IR, the options, and the release of Triton, which brings its assembler. So where a digest
is known, `compile_new` stops at the IR: a fifth of the time. With TILEWISE_COMPILE_ANEW=1 nothing is known, and tests
that pass write what they compiled. Do that after a change of kernels, or every run in CI compiles them again.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("known")
ANEW = "TILEWISE_COMPILE_ANEW"
MOST = 0.25
"""The part of a script's kernels that may be new, so that a run stays short."""


class KnownError(Exception):
    """The IR is known; nothing is compiled."""


def _file(triton: str, section: str) -> Path:
    return FOLDER / triton / f"{section.replace('/', '-').replace('.py', '').replace(' ', '-')}.txt"


def known(section: str) -> frozenset[str]:
    """Return the digests of what a script compiles, by its name, with this release of Triton."""
    import triton

    file = _file(triton.__version__, section)
    return frozenset() if ANEW in os.environ or not file.exists() else frozenset(file.read_text().split())


def remember(triton: str, section: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write the digests of rows, which hold no fault, if everything was compiled anew; else see that few are new."""
    file = _file(triton, section)
    if ANEW in os.environ:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(sorted({row["ir"] for row in rows if "ir" in row})) + "\n")
    elif file.exists():
        new = sum("known" not in row for row in rows)
        assert new <= MOST * len(rows), f"{new} of {len(rows)} kernels are compiled in every run: renew {file.name}"


def compile_new(make: Callable[[], Any], digests: frozenset[str]) -> tuple[str, Any]:
    """Compile one kernel by `make`; return the digest of its IR, and the kernel, or None if the digest is known."""
    from triton import knobs

    with knobs.compilation.scope(), _digested(digests) as found:
        knobs.compilation.always_compile = True
        try:
            kernel = make()
        except KnownError:
            kernel = None
    (digest,) = found
    return digest, kernel


def _told(target: Any, options: Any) -> str:
    """Return what options say, wherever Triton lies: of AMD's, Triton 3.6.0 hashes the paths of libraries."""
    import triton

    if target.backend != "hip":
        return options.hash()
    return "_".join(f"{name}-{value}" for name, value in vars(options).items()).replace(triton.__path__[0], "")


@contextmanager
def _digested(digests: frozenset[str]) -> Iterator[list[str]]:
    """Note the digests of all IR that is built, and stop at those."""
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    found: list[str] = []
    originals = {source: source.make_ir for source in (ASTSource, GluonASTSource)}

    def replaced(make_ir: Any) -> Any:
        def make(self: Any, target: Any, options: Any, *rest: Any) -> Any:
            module = make_ir(self, target, options, *rest)
            text = f"{target} {_told(target, options)} {module.str_nodebug()}"
            found.append(hashlib.sha256(text.encode()).hexdigest()[:16])
            if found[-1] in digests:
                raise KnownError
            return module

        return make

    for source, make_ir in originals.items():
        source.make_ir = replaced(make_ir)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for source, make_ir in originals.items():
            source.make_ir = make_ir  # type: ignore[method-assign]
