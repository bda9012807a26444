"""Write the tables of registers and shared memory in docs/internals: python tools/resources.py.

Compiles the Hopper kernels without a GPU, as tests/hopper/test_compile.py does, with the installed Triton.
"""

import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from instructions import load

from studies.bench.tables import markdown
from studies.pages.marked import write

ROOT = Path(__file__).parents[1]
PAGES = ("hopper-forward", "hopper-backward", "hopper-fp32")
"""Of docs/internals."""
COLUMNS = ["kernel", "head size", "call", "registers", "other warps", "local memory", "shared memory, kB"]
REGISTERS = re.compile(r"requestedRegisters = array<i32: ([\d, ]+)>")
"""What the roles of warps ask for, first those that compute."""


class Row(NamedTuple):
    """One compiled kernel."""

    kernel: str
    head_size: int
    call: str
    registers: list[int]
    """Those of each role, the largest first."""
    spills: int
    shared: int

    @property
    def cells(self) -> list[str]:
        """Return a line of the table."""
        most, *others = self.registers
        few = ", ".join(map(str, others))
        where = [self.kernel, str(self.head_size), self.call]
        return [*where, str(most), few, str(self.spills or "none"), f"{self.shared / 1024:.0f}"]


def compiled() -> Iterator[Row]:
    """Compile the kernels that multiply, of every call in the tests' CALLS."""
    forward, fp32 = load("hopper_offline", "hopper/offline.py"), load("fp32_offline", "hopper/offline_fp32_backward.py")
    load("reader", "triton/offline.py").use_target("sm_90")
    for size, names in forward.CALLS.items():
        for name in names:
            for one in forward.launches(size, forward.calls()[name]):
                if (kernel := one.kernel.fn.__name__) in forward.MULTIPLY and name != "biased":
                    yield row(kernel, size, name, one.compile())
    for size, names in fp32.CALLS.items():
        for precision, name in product(fp32.KINDS, names):
            for one in fp32.launches(size, precision, name):
                if (kernel := one.kernel.fn.__name__) == "attention_backward_fp32":
                    yield row(kernel, size, f"{precision} {name}", one.compile())


def row(kernel: str, size: int, call: str, binary: Any) -> Row:
    """Read a compiled kernel."""
    reader = load("reader", "triton/offline.py")
    found = reader.read(binary)
    (roles,) = REGISTERS.findall(binary.asm["ttgir"])
    registers = sorted({int(number) for number in roles.split(",")}, reverse=True)
    if len(registers) == 1:  # a single warpgroup computes, with what these leave of two
        registers = [2 * binary.metadata.maxnreg - registers[0], *registers]
    return Row(kernel, size, call, registers, found.spills, found.shared)


def page_of(kernel: str) -> str:
    """Return the page that has a kernel's row."""
    return PAGES[2 if "fp32" in kernel else kernel.endswith("backward")]


def main() -> None:
    """Fill in every page."""
    sys.path.insert(0, str(ROOT / "tests"))
    rows = list(compiled())
    for page in PAGES:
        table = markdown(COLUMNS, [each.cells for each in rows if page_of(each.kernel) == page])
        print(write(ROOT / "docs" / "internals" / f"{page}.md", {"resources": f"\n\n{table}\n\n"}))


if __name__ == "__main__":
    main()
