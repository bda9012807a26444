"""Bundles: files of compiled kernels, for machines that should compile none.

A bundle is a zip file. bundle.json tells what it is for; each other folder is a kernel, and its name a hash of all that
the compiler read (`portable_key`), so that what does not fit is not found. A kernel is machine code, which reads and
writes all memory of its process on the GPU. So a bundle is used only if it is named or installed, and only if nobody
else could have written it.
"""

import importlib.util
import json
import os
import re
import stat
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from typing import Any

FORMAT = 1
VARIABLE = "TILEWISE_BUNDLE"
WHEEL = "tilewise_kernels"
"""The package, if it is installed, whose folder holds a bundle for each release of Triton."""
ABOUT = "bundle.json"
ENTRY = re.compile(r"[0-9a-f]{64}/[A-Za-z_]\w{0,149}\.(json|cubin|hsaco)", re.ASCII)
LARGEST, LARGEST_FILE = 256 << 20, 32 << 20
"""Bytes of a bundle, and of a file in it once it is unpacked."""
DAMAGED = zipfile.BadZipFile, zlib.error, EOFError, RuntimeError
"""What zipfile raises for a file that is not whole, encrypted, or compressed in another way."""
NO_LINES = "TRITON_DISABLE_LINE_INFO"
"""The variable that leaves out the lines of the source, which are most of a kernel's bytes, and do not change it."""


class Bundle:
    """A bundle that was checked, in memory."""

    def __init__(self, path: str, expected: str | None = None, installed: bool = False) -> None:
        data = read(path, installed)
        self.path, self.sha256 = os.path.abspath(path), sha256(data).hexdigest()
        if expected is not None and self.sha256 != expected.lower():
            raise ValueError(f"sha256 of {path} must be {expected}, got {self.sha256}; use the file that has this hash")
        self.about: dict[str, Any] = {}
        self.kernels: dict[str, set[str]] = {}
        try:
            self.zip = zipfile.ZipFile(BytesIO(data))
            wrong = self._wrong()
        except (*DAMAGED, KeyError, TypeError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise ValueError(
                f"bundle must be a file that `tilewise warm --save` wrote, got {path} ({wrong}); write it again"
            )
        made_for, here = self.about["triton"], installed_triton()
        if made_for != here:
            raise ValueError(
                f"bundle must be for Triton {here}, which is installed, got {path} for Triton {made_for}; "
                "write one with this Triton by `tilewise warm --save`"
            )

    def __str__(self) -> str:
        never = self.about.get("never_run", ())
        chips = ", ".join(chip + " (never run on a GPU)" * (chip in never) for chip in self.about["chips"])
        return f"{self.path} sha256={self.sha256}, {len(self.kernels)} kernels for {chips}"

    def files(self, key: str) -> dict[str, bytes]:
        """Return a kernel's files by name; none if it is not here."""
        try:
            return {name: self._content(f"{key}/{name}") for name in self.kernels.get(key, ())}
        except DAMAGED as error:
            raise ValueError(f"bundle must be whole, got {self.path} ({error}); write it again") from None

    def _wrong(self) -> str | None:
        """Read what the file says of itself; return what is wrong with it, if anything."""
        for file in self.zip.infolist():
            if file.file_size > LARGEST_FILE:
                return f"{file.filename!r} has {file.file_size} bytes, and may have {LARGEST_FILE}"
            if file.filename != ABOUT:
                if not ENTRY.fullmatch(file.filename):
                    return f"{file.filename!r} is no file of a kernel"
                key, name = file.filename.split("/")
                self.kernels.setdefault(key, set()).add(name)
        if [names for names in self.kernels.values() if len(names) != 2]:
            return "a kernel has not two files"
        self.about = json.loads(self._content(ABOUT))
        if self.about["format"] != FORMAT:
            return f"it has format {self.about['format']}, and this tilewise reads {FORMAT}"
        return None if {"triton", "chips"} <= self.about.keys() else f"{ABOUT} is not complete"

    def _content(self, name: str) -> bytes:
        about = self.zip.getinfo(name)
        with self.zip.open(about) as file:
            return file.read(about.file_size)  # no more, whatever it unpacks to; then its checksum is wrong


def read(path: str, installed: bool = False) -> bytes:
    """Read a file if nobody but root and this user can have chosen its bytes.

    An installed one may also come from those who can write this package, and so can run what they want anyway.
    """
    at_once = getattr(os, "O_NONBLOCK", 0)  # where path is a pipe
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once)) as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode):
            raise PermissionError(f"{path} is not a regular file; name the file that `tilewise warm --save` wrote")
        if hasattr(os, "geteuid"):  # not on Windows
            package = os.stat(__file__)
            owners, writers = {0, os.geteuid()}, stat.S_IWGRP | stat.S_IWOTH
            if installed and (package.st_uid, package.st_gid) == (seen.st_uid, seen.st_gid):
                owners, writers = {package.st_uid}, writers & ~package.st_mode
            if seen.st_uid not in owners:
                raise PermissionError(
                    f"{path} holds machine code, and its owner is user {seen.st_uid}, neither you nor root; "
                    "make a copy of your own if you trust it"
                )
            if seen.st_mode & writers:
                raise PermissionError(
                    f"{path} holds machine code, and others than its owner can write it (it has mode "
                    f"{seen.st_mode & 0o777:o}); run chmod go-w on it if you trust it"
                )
        if seen.st_size > LARGEST:
            raise ValueError(f"bundle must have at most {LARGEST} bytes, got {path} of {seen.st_size}; write it again")
        return file.read(LARGEST)


def installed_triton() -> str:
    """Return the version of the installed Triton, or "none"."""
    try:
        from triton import __version__
    except ImportError:
        return "none"
    return __version__


USED: list[Bundle] = []
"""What `use_bundle` was given."""


def use_bundle(file: str | os.PathLike[str], sha256: str | None = None) -> str:
    """Take compiled kernels from a bundle, which `tilewise warm --save` wrote, and return the SHA-256 of its bytes.

    In this process, a kernel that Triton's cache lacks is from now on taken from the file, if it is there, and compiled
    if not. Of several bundles the first that has a kernel gives it. The variable TILEWISE_BUNDLE does the same.

    Args:
        file: a regular file that belongs to you or to root, and that nobody else can write. It holds machine code.
        sha256: what the hash of its bytes must be; `tilewise warm --save` prints it. None checks no hash.

    Raises:
        FileNotFoundError, PermissionError: there is no such file, or others could have written it.
        ValueError: it has another hash, is for another Triton, or is no bundle.
    """
    bundle = Bundle(os.fspath(file), sha256)
    if bundle.sha256 not in [used.sha256 for used in USED]:
        USED.append(bundle)
    return bundle.sha256


def bundles() -> list[Bundle]:
    """Return the bundles in use: those of `use_bundle`, those that TILEWISE_BUNDLE names, and the installed one."""
    return [*USED, *named(os.environ.get(VARIABLE, "")), *installed()]


@lru_cache(8)
def named(text: str) -> tuple[Bundle, ...]:
    """Open the bundles of a list such as "FILE#sha256=HASH:FILE"."""
    given = [one.partition("#sha256=") for one in text.split(os.pathsep) if one]
    return tuple(Bundle(path, expected if mark else None) for path, mark, expected in given)


@lru_cache(1)
def installed() -> tuple[Bundle, ...]:
    """Open the bundle of the installed package WHEEL for this Triton, if there is one; warn if it cannot be used."""
    found = importlib.util.find_spec(WHEEL)
    for folder in (found and found.submodule_search_locations) or ():
        path = os.path.join(folder, f"triton-{installed_triton()}.zip")
        if os.path.exists(path):
            try:
                return (Bundle(path, installed=True),)
            except (OSError, ValueError) as error:
                warnings.warn(f"kernels that are installed are not used: {error}", RuntimeWarning, stacklevel=2)
    return ()


def described() -> list[str]:
    """Say which bundles are in use, or why not, for people."""
    try:
        return [str(bundle) for bundle in bundles()]
    except (OSError, ValueError) as error:
        return [f"refused: {error}"]


def portable_key(key: str, compile: Callable[[], Any]) -> tuple[str, Any]:
    """Return the key of a kernel in a bundle, and its options, from Triton's key and what would compile it.

    Triton's key holds a hash of Triton's own files, which differ by Python's version. Here, its version replaces it.
    Paths of libraries become their names, and it does not matter whether the kernel has the lines of its source.
    """
    from triton import __version__
    from triton.runtime import cache

    cells = (cell.cell_contents for cell in compile.__closure__ or ())
    given = dict(zip(compile.__code__.co_freevars, cells, strict=True))
    options, variables = given["options"], given["env_vars"]
    rest = key.removeprefix(cache.triton_key()).removesuffix(str(sorted(variables.items())))
    if "hip" in options.backend_name:  # whose hash has paths; CUDA's has hashes of these files
        plain = vars(options) | {"extern_libs": [name for name, _ in options.extern_libs]}
        rest = rest.replace(options.hash(), str(sorted(plain.items())))
    others = [item for item in sorted(variables.items()) if item[0] != NO_LINES]
    return sha256(f"{__version__}{rest}{others}".encode()).hexdigest(), options


def unpack(key: str, name: str, compile: Callable[[], Any]) -> bool:
    """Put a kernel from a bundle into Triton's cache, the list of its files last. Return whether a bundle has it."""
    if not (found := bundles()):
        return False
    from triton.runtime.cache import get_cache_manager

    listed = f"{name[:150]}.json"
    own, options = portable_key(key, compile)
    files = next((bundle.files(own) for bundle in found if listed in bundle.kernels.get(own, ())), None)
    if files is None:
        return False
    about = json.loads(files[listed]) | {"extern_libs": options.extern_libs, "hash": sha256(key.encode()).hexdigest()}
    files[listed] = json.dumps(about).encode()
    manager = get_cache_manager(about["hash"])
    manager.put_group(listed, {file: manager.put(content, file) for file, content in files.items()})
    return True
