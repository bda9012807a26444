"""Print the tables of docs/results/eight-bits.md."""

from typing import Annotated

import typer

from ..bench.tables import markdown, three_digits
from .schemes import by_length, errors, gradient_errors

DRAWS = {
    "paper": "N(0, 1) + N(0, 100) Bernoulli(0.001)",
    "normal": "N(0, 1)",
    "channels": "channels of unequal size, means in K, a sink token",
}


def eight_bits(
    rows: Annotated[int, typer.Option(help="Tokens of the first tables.")] = 4096,
    size: Annotated[int, typer.Option(help="Head size: a power of two.")] = 128,
    longest: Annotated[int, typer.Option(help="Keys of the longest row.")] = 131072,
) -> None:
    """Compare errors of 8-bit attention with FlashAttention-3's scheme and with 16 bits, on this CPU."""
    found = {name: list(errors(name, rows, size)) for name in DRAWS}
    lines = [
        [scheme, *(f"{each[n][1]:.1e} ({100 * each[n][2]:.1f} %)" for each in found.values())]
        for n, (scheme, *_) in enumerate(found["paper"])
    ]
    print(f"Root mean square error, and its share of o: {rows} tokens, head size {size}\n")
    print(markdown(["scheme", *DRAWS.values()], lines))
    print("\nLength of o over its true length, with a mean in V\n")
    lengths = [n for n in (4096, 16384, 65536, 131072) if n <= longest]
    told = [[str(n), *(f"{x:.5f}" for x in of.values())] for n, of in by_length(lengths)]
    print(markdown(["keys", "fp8", "int8"], told))
    for name, title in DRAWS.items():
        print(f"\nGradients, relative errors in %: {title}\n")
        lines = [[what, *(three_digits(100 * x) for x in of)] for what, of in gradient_errors(name)]
        print(markdown(["forward and backward", "dq", "dk", "dv"], lines))
