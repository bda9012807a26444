"""Where a call lies in a larger one, of which it computes some rows, keys, heads or batch entries (Origin)."""

from dataclasses import dataclass

from .value import constant, integer


@dataclass(frozen=True)
class Origin:
    """Say where a call's first row, key, head and batch entry are in the whole, for parts that several calls compute.

    Dropout then draws the whole's bits, and Alibi, Prefix and Padding (lengths) count from the whole's first row and
    key: query i is at row + i, key j at column + j. All other masks, and Bias, describe the call's own rows and keys;
    so Causal and Window still align its last query with its last key. Slopes and sinks are those of the call's heads.

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
