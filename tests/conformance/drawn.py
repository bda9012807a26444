"""Cases nobody thought of: values that are drawn at random, put together."""

from dataclasses import fields
from random import Random
from typing import Any, NamedTuple

from .cases import Case, alibi, bf16, bias, both, causal, dense, documents, fp16, fp32, padding, prefix, softcap, window


class Scale(NamedTuple):
    """How large what is drawn is."""

    tile: int
    """Half of the lengths are whole numbers of these, up to 40."""
    sizes: tuple[int, ...]
    """Of heads."""
    entries: int
    """Of all score matrices, at most."""


SCALES = {
    "large": Scale(128, (64, 64, 128, 128, 128, 256, 32, 72, 96, 200), 60_000_000),
    "tiny": Scale(16, (8, 16, 40, 64), 50_000),
}


def drawn(number: int, size: str) -> Case:
    """Case `number` of a size, a key of SCALES. Its name is what was drawn. `Case.size` stays "tiny", which makes plain
    torch sum in 32 orders: among this many cases luck with four would fail some."""
    draw, (tile, sizes, entries) = Random(f"{size} {number}"), SCALES[size]
    far, near = draw.randrange(6 * tile), draw.choice((0, 0, draw.randrange(2 * tile)))
    masks = {
        "full": both(), "causal": causal, f"window {far} {near}": window(far, near),
        f"window None {near}": window(None, near), f"causal & window {far}": both(causal, window(far, 0)),
        "prefix": prefix, "causal & padding": both(causal, padding), "documents": documents,
        "causal & documents": both(causal, documents), "dense": dense("MN"), "causal & dense": both(causal, dense()),
    }  # fmt: skip
    scores = {"softcap": softcap(), "alibi": alibi(), "bias HMN": bias("HMN"), "bias B11N": bias("B11N")}
    packed = draw.random() < 0.2
    if packed:  # there these have no meaning
        masks = {name: mask for name, mask in masks.items() if not ("documents" in name or "dense" in name)}
        scores = {name: score for name, score in scores.items() if "bias" not in name}

    def length() -> int:
        most = tile * draw.choice((1, 2, 3, 4, 5, 8, 10, 16, 24, 40))
        return most if draw.random() < 0.5 else draw.randint(1, most)

    def lengths() -> tuple[int, int]:
        M = length()
        return M, M if draw.random() < 0.7 else length()

    pairs = [lengths() for _ in range(draw.randint(1, 3))]
    H_k, group = draw.randint(1, 4), draw.choice((1, 1, 1, 2, 3, 4, 8, 16))
    while sum(M * N for M, N in pairs) * H_k * group > entries:
        if H_k > 1:
            H_k -= 1
        elif len(pairs) > 1:
            pairs.pop()
        else:
            pairs = [(-(-M // 2), -(-N // 2)) for M, N in pairs]
    (M, N), B = pairs[0], len(pairs)
    mask, chosen = draw.choice([*masks, "causal", "causal"]), draw.sample(list(scores), draw.choice((0, 0, 0, 1, 2)))
    dtype, D = draw.choice((bf16, bf16, bf16, fp16, fp32)), draw.choice(sizes)
    told: dict[str, Any] = {
        "B": B, "M": M, "N": N, "H": H_k * group, "H_k": H_k, "D": D,
        "D_v": draw.choice((None, None, None, draw.choice(sizes))), "dtype": dtype,
        "sink": draw.choice((None, None, None, dtype)), "dropout": draw.choice((0.0, 0.0, 0.0, 0.2)),
        "lengths": tuple(pairs) if packed else None, "loss": draw.choice(("both", "o", "o")),
        "strides": draw.choice(("plain", "heads_first")),
        "precision": draw.choice((None, "fp16x3")) if dtype == fp32 and size == "large" else None,
        "deterministic": draw.random() < 0.2,
    }  # fmt: skip
    usual = {f.name: f.default for f in fields(Case)}
    name = ", ".join([mask, *chosen, *(f"{key} {value}" for key, value in told.items() if value != usual[key])])
    return Case(f"drawn {number}: {name}", mask=masks[mask], score=tuple(scores[name] for name in chosen), **told)
