"""Write the repository that Hugging Face's `kernels` loads: `python hub/write.py FOLDER`, or `make hub`.

The package is pure Python, so each variant is a copy of it. Publishing the folder is left to its owner.
"""

import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "tilewise"
BACKENDS = ("cpu", "cuda", "rocm")
"""The builds of PyTorch that `kernels` tells apart, and that tilewise runs on."""
VERSION = 1
"""What callers of `get_kernel` ask for, as branch v1 on the Hub. A change that breaks them makes it one more."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "__main__.py", "cli")
"""Commands: `python -m` needs a package that a search finds."""
NAMES = "\nfrom .compat.flash_attn import flash_attn_func, flash_attn_varlen_func\n"
"""The functions that transformers looks for in a kernel, added to the package's own names."""


def write(folder: Path) -> None:
    """Write all variants below `folder`/build, in place of those that are there."""
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        shutil.copytree(PACKAGE, variant, ignore=LEFT_OUT)
        with (variant / "__init__.py").open("a") as file:
            file.write(NAMES)
        (variant / "metadata.json").write_text(json.dumps(metadata(variant, backend), indent=2) + "\n")
    shutil.copy(HERE.parent / "LICENSE", folder)
    shutil.copy(HERE / "README.md", folder)


def metadata(variant: Path, backend: str) -> dict[str, object]:
    """Describe a variant. Its id names the module, and with it the operators: another text is another id."""
    texts = [
        path.relative_to(variant).as_posix().encode() + path.read_bytes() for path in sorted(variant.rglob("*.py"))
    ]
    return {
        "id": f"_tilewise_{backend}_{sha256(b''.join(texts)).hexdigest()[:8]}",
        "name": "tilewise",
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],  # on a GPU Triton, which PyTorch brings
        "backend": {"type": backend},
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python hub/write.py FOLDER")
    write(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {', '.join(BACKENDS)}")
