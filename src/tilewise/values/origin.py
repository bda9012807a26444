"""Where a call lies in a larger one, of which it computes some rows, keys, heads or batch entries (Origin)."""

from dataclasses import dataclass
from typing import Any

from .value import constant, integer


@dataclass(frozen=True)
class Origin:
    """Say where a call's first row, key, head and batch entry are in the whole, for parts that several calls compute.

    Dropout then draws the whole's bits, and Alibi, Prefix and Padding (lengths) count from the whole's first row and
    key: query i is at row + i, key j at column + j. All other masks, and Bias, describe the call's own rows and keys;
    so Causal and Window still align its last query with its last key. Slopes and sinks are those of the call's heads.

    Functions, and masks joined by `|` or `~`, get the whole's b, h, i and j: rows from 0, whatever `align` says. Their
    captured tensors are the whole's, too.

    heads: the number of query heads of the whole, where the call has some of them; None for the call's own.

    Raises TypeError or ValueError for a number that is no int >= 0, or a head that is not among `heads`.
    """

    row: int = 0
    column: int = 0
    head: int = 0
    heads: int | None = None
    batch: int = 0

    def __post_init__(self) -> None:
        for name in ("row", "column", "head", "heads", "batch"):
            number = getattr(self, name)
            if name == "heads" and number is None:
                continue
            number = integer(f"Origin: {name}", number, "an int >= 0")
            if number < 0:
                raise ValueError(f"Origin: {name} must be an int >= 0, got {number}; leave it out for 0")
            object.__setattr__(self, name, constant(number))
        if self.heads is not None and self.head >= self.heads:
            raise ValueError(
                f"Origin: head must be below heads = {self.heads}, got {self.head}; pass the whole's number"
            )

    @staticmethod
    def of(given: Any) -> "Origin":
        """Return what `origin=` says, by default a whole, or raise TypeError."""
        if given is None:
            return WHOLE
        if not isinstance(given, Origin):
            raise TypeError(
                f"origin must be None or an Origin, got {given!r}; write origin=tilewise.Origin(row, column)"
            )
        return given

    @property
    def plain(self) -> tuple[int | None, ...]:
        """Return the numbers, as a recipe holds them."""
        return self.row, self.column, self.head, self.heads, self.batch

    def of_heads(self, H: int) -> "Origin":
        """Return from where dropout counts in a call of H heads: WHOLE if that is its own beginning."""
        heads = H if self.heads is None else self.heads
        if self.head + H > heads:
            raise ValueError(
                f"origin must have room for q's {H} heads, got head {self.head} of {heads}; "
                "pass heads=, the number of the whole's query heads"
            )
        begins = not (self.row or self.column or self.head or self.batch) and heads == H
        return WHOLE if begins else Origin(self.row, self.column, self.head, heads, self.batch)

    def counters(self, H: int) -> tuple[int, int, int, int]:
        """Return row, column, heads and first score matrix in the whole, for dropout of a call with H heads."""
        heads = H if self.heads is None else self.heads
        return self.row, self.column, heads, self.batch * heads + self.head

    def against(self) -> list[str]:
        """Return why a GPU's dropout cannot begin here: its counters are for 16 rows and 64 keys."""
        if not (self.row % 16 or self.column % 64):
            return []
        return [
            f"its dropout counts rows in 16s and keys in 64s, got origin with row {self.row} and column {self.column}; "
            "choose multiples of these"
        ]


class Whole(Origin):
    """The origin of a call that is no part: masks and scores align its last query with its last key."""

    @property
    def plain(self) -> tuple[()]:
        return ()


WHOLE = Whole()


def origin_of(plain: tuple[int | None, ...]) -> Origin:
    """Return the origin of whose numbers a recipe holds these."""
    return Origin(*plain) if plain else WHOLE  # type: ignore[arg-type]
