"""Print the tables of docs/results/eight-bits.md."""

from dataclasses import replace
from typing import Annotated

import typer

from ..bench.tables import markdown, three_digits
from ..console import sentences
from ..options import pick_device
from ..training.train import MODELS
from .schemes import by_length, errors, gradient_errors
from .training import compared, trainings

DRAWS = {
    "paper": "N(0, 1) + N(0, 100) Bernoulli(0.001)",
    "normal": "N(0, 1)",
    "outliers": "four large channels",
    "sink": "a sink token",
    "channels": "channels of unequal size, means in K, a sink token",
}
TABLES = ("errors", "lengths", "gradients", "training")


def eight_bits(
    tables: Annotated[list[str] | None, typer.Option("--table", help=f"Only these of {', '.join(TABLES)}.")] = None,
    rows: Annotated[int, typer.Option(help="Tokens of the first tables.")] = 4096,
    size: Annotated[int, typer.Option(help="Head size: a power of two.")] = 128,
    longest: Annotated[int, typer.Option(help="Keys of the longest row.")] = 131072,
    model: Annotated[str, typer.Option(help=f"The GPT to train: {', '.join(MODELS)}.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Steps of each training.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Where the GPT is trained: cpu or cuda.")] = "cpu",
) -> None:
    """Compare errors of 8-bit attention with FlashAttention-3's scheme and with 16 bits; train a GPT with it."""
    with sentences():
        for name in tables or ():
            if name not in TABLES:
                raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
        if model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    wanted = tables or TABLES
    if "errors" in wanted:
        _errors(rows, size)
    if "lengths" in wanted:
        lengths = [n for n in (4096, 16384, 65536, 131072) if n <= longest]
        cells = [[str(n), *(f"{x:.5f}" for x in of.values())] for n, of in by_length(lengths)]
        print("\nLength of o over its true length, with a mean in V\n")
        print(markdown(["keys", "fp8", "int8", "fp8, sums kept in the tensor core (simulated)"], cells))
    if "gradients" in wanted:
        _gradients()
    if "training" in wanted:
        _training(model, steps, device)


def _errors(rows: int, size: int) -> None:
    found = {name: list(errors(name, rows, size)) for name in DRAWS}
    lines = [
        [scheme, *(f"{each[n][1]:.1e} ({100 * each[n][2]:.1f} %)" for each in found.values())]
        for n, (scheme, *_) in enumerate(found["paper"])
    ]
    print(f"Root mean square error, and its share of o: {rows} tokens, head size {size}\n")
    print(markdown(["scheme", *DRAWS.values()], lines))


def _gradients() -> None:
    for name, title in DRAWS.items():
        print(f"\nGradients, relative errors in %: {title}\n")
        lines = [[what, *(three_digits(100 * x) for x in of)] for what, of in gradient_errors(name)]
        print(markdown(["forward and backward", "dq", "dk", "dv"], lines))


def _training(model: str, steps: int | None, device: str) -> None:
    settings = MODELS[model](pick_device(device))
    settings = replace(settings, steps=steps) if steps else settings
    print(
        f"\nA GPT of {settings.layers} layers, width {settings.width}, {settings.heads} heads, {settings.steps} steps "
        f"of {settings.batch} x {settings.context} tokens: losses in nats a token\n"
    )
    print(markdown(["attention", "last loss", "less fp32's", "most"], compared(list(trainings(settings)))))
