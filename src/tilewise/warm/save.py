"""Bundles are written here: kernels that `warm` has compiled, as `host/bundle.py` reads them."""

import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from .. import __version__
from ..host.bundle import ABOUT, ENTRY, FORMAT, NO_LINES, installed_triton, portable_key
from .warm import Call


def packed(key: str, name: str, compile: Callable[[], Any]) -> dict[str, bytes]:
    """Return the files of a kernel in Triton's cache by their names in a bundle, without what differs by machine."""
    from triton.runtime.cache import get_cache_manager

    group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(f"{name[:150]}.json") or {}
    own, _ = portable_key(key, compile)
    found = {f"{own}/{file}": path for file, path in group.items() if ENTRY.fullmatch(f"{own}/{file}")}
    files = {}
    for file, path in found.items():
        with open(path, "rb") as content:
            files[file] = content.read()
        if file.endswith(".json"):
            about = json.loads(files[file])
            files[file] = _text({name: about[name] for name in about.keys() - {"extern_libs", "hash", NO_LINES}})
    return files


def save(path: str, files: Mapping[str, bytes], calls: Sequence[Call], never_run: Iterable[str] = ()) -> str:
    """Write the kernels of calls as a bundle, and return the SHA-256 of its bytes.

    They depend on nothing but the arguments. `never_run` names chips for which the kernels have never run.
    """
    about = {
        "format": FORMAT,
        "triton": installed_triton(),
        "tilewise": __version__,
        "chips": sorted({call.problem.target for call in calls}),
        "never_run": sorted(never_run),
        "calls": [f"{call.problem.target}: {call}" for call in calls],
    }
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(path))) as folder:
        made = os.path.join(folder, "bundle")
        with zipfile.ZipFile(made, "w") as bundle:
            for name, content in ((ABOUT, _text(about)), *sorted(files.items())):
                bundle.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)  # without a date
        os.chmod(made, 0o644)
        os.replace(made, path)
    with open(path, "rb") as written:
        return sha256(written.read()).hexdigest()


def _text(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, indent=1, sort_keys=True).encode()
