"""Python programs in processes of their own, which fork where PyTorch is imported: that takes longer than most."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SERVER = """
import functools, gc, importlib, json, os, runpy, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()  # or each process would copy all that was imported, at its end
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    (option, program, *sys.argv[1:]), folder, environment, files = json.loads(line)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate((os.devnull, *files)):
        os.dup2(os.open(file, os.O_CREAT | os.O_RDWR), number)
    if option == "-m":
        sys.path[0], __run__ = os.getcwd(), functools.partial(runpy._run_module_as_main, program)
    else:
        __run__ = functools.partial(exec, program, globals())
    for name in [name for name in globals() if not name.startswith("__")]:
        del globals()[name]
    del name
    globals().pop("__run__")()
    break
"""
"""Does in a fork, for each line of its input, what Python does for -c PROGRAM or -m MODULE."""


def run(
    *arguments: str, imports: tuple[str, ...] = ("torch",), cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with -c PROGRAM or -m MODULE and arguments, modules imported. Return its status and what it prints."""
    server = _server(*imports)
    with TemporaryDirectory() as folder:
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        given = arguments, str(cwd or Path.cwd()), {**os.environ, **environment}, files
        print(json.dumps(given), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(Path(file).read_text() for file in files))


@cache
def _server(*imports: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER, *imports]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its input, with which it ends
    return server
