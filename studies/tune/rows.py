"""Name rows of the tables of tiles, and list the rows that are compared with one: its neighbours."""

from typing import Any

from tilewise.hopper.tiles import Forward
from tilewise.triton.tiles import Tiles

Row = Any
"""A row of one of Hopper's tables, or of a portable kernel's."""


def title(key: Any) -> str:
    """Return a key as text, without its kind of chip."""
    if isinstance(key, tuple) and isinstance(key[0], str):
        _, entry_bytes, size, *rest = key
        return " ".join((f"{8 * entry_bytes}-bit", f"D{size}", *rest))
    size, *rest = key if isinstance(key, tuple) else (key,)
    return " ".join((f"D{size}", *(f"V{word}" if isinstance(word, int) else word for word in rest)))


def neighbours(row: Row) -> list[Row]:
    """Return every other row that one change makes of a row. To go further, run `tune` again."""
    made = _of_portable(row) if isinstance(row, Tiles) else _of_hopper(row)
    return [other for other in dict.fromkeys(made) if other != row]


def _of_portable(row: Tiles) -> list[Tiles]:
    """Change the rows, columns or warps by a factor of two, or rows and warps together; or the stages by one; or leave
    out the cap on registers. No side is below 16, unless the row's is."""
    B_r, B_c, warps, stages, _ = row
    changes = (
        {"B_r": B_r // 2}, {"B_r": B_r * 2}, {"B_c": B_c // 2}, {"B_c": B_c * 2}, {"warps": warps // 2},
        {"warps": warps * 2}, {"B_r": B_r // 2, "warps": warps // 2}, {"B_r": B_r * 2, "warps": warps * 2},
        {"stages": stages - 1}, {"stages": stages + 1}, {"registers": None},
    )  # fmt: skip
    made = [row._replace(**change) for change in changes]
    least = min(B_r, B_c, 16)
    fits = [t for t in made if min(t.B_r, t.B_c) >= least and max(t.B_r, t.B_c) >= 16]  # which some product sums over
    return [t for t in fits if t.warps in (4, 8, warps) and t.stages > 0]


def _of_hopper(row: Row) -> list[Row]:
    """Change one field or two. Where programs share the registers, none are left for other tiles."""
    if not isinstance(row, Forward):
        return [row._replace(**change) for change in OF_BACKWARD]
    kept = {"B_c", "registers"} if row.programs > 1 else set()
    return [row._replace(**change) for change in OF_FORWARD if not kept & {*change}]


OF_FORWARD: tuple[dict[str, Any], ...] = (
    {"warpgroups": 2, "registers": 240}, {"warpgroups": 3, "registers": 160},
    {"B_c": 64}, {"B_c": 64, "kv_stages": 3}, {"B_c": 128},
    {"q_stages": 1}, {"q_stages": 1, "kv_stages": 3}, {"q_stages": 2}, {"kv_stages": 2}, {"kv_stages": 3},
    {"pingpong": True}, {"pingpong": False}, {"fetch_early": True}, {"fetch_early": False},
    {"wait_pv": 0}, {"wait_pv": 1}, {"wait_pv": 2},
)  # fmt: skip
OF_BACKWARD: tuple[dict[str, Any], ...] = (
    {"q_stages": 1}, {"q_stages": 2}, {"q_stages": 3}, {"do_stages": 1}, {"do_stages": 2}, {"do_stages": 3},
)  # fmt: skip
"""Its B_r and B_c follow from the head size: pieces of dQ are 64 x 64, and a group holds 64 keys."""
