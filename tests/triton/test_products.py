"""Every kernel's Triton IR and options, without a GPU: no address is computed from a 32-bit product that can pass 2^31,
and products and sums may fuse."""

import pytest
from scripts import lines

pytestmark = pytest.mark.compile

ALLOWED = {
    "a row or a key of a sequence; check.py refuses lengths from 2^30 on": {
        "studies/accumulation/forward.py": ("t * B_R", "j * B_C"),
        "hopper/backward/postprocess.py": ("t // BLOCKS * 64",),
        "hopper/backward/preprocess.py": ("t * ROWS",),
        "hopper/forward/attend.py": ("j * B_C",),
        "hopper/fp32/preprocess.py": ("t * BLOCK", "t * tile.ROWS"),
        "hopper/fp32/forward.py": ("j * B_C",),
        "hopper/backward/keys.py": ("m * B_R", "t_k * B_C"),
        "hopper/fp32/split.py": ("t * ROWS",),
        "hopper/forward/queries.py": ("m * (64 * WARPGROUPS)",),
        "tile/gather.py": (
            "t_r * tile.B_R", "t_c * tile.B_C", "(t_r + x % each * DOWN) * B_R", "c * B_C",
        ),
        "merge/kernel.py": ("t * B_R",),
        "tile/renormalize.py": ("t * B_R", "x * B_C"),
        "tile/ranges.py": ("r * B_R", "c * B_C"),
        "triton/backward.py": (
            "t * B_R", "t * B_C",
            "tile_at(variant.lists, lists, x) * B_R",
            "partial_at(variant.lists, lists, x, lo, full_lo, full_hi) * B_R",
            "tile_at(variant.lists, lists, x) * B_C",
            "partial_at(variant.lists, lists, x, lo, full_lo, full_hi) * B_C",
        ),
        "triton/forward.py": ("t * B_R", "j * B_C"),
        "triton/chunked/kernel.py": ("r * B_R", "t * B_C", "lo * B_R", "x % each * SLICE"),
    },
    "rows in all, rounded up; cu_seqlens count them in 32 bits": {
        "tile/rows.py": ("(M + 15) // 16 * 16",),
        "tile/sink.py": ("t * ROWS", "(start // BLOCK + b) * BLOCK"),
    },
    "at most the number of packed sequences": {"tile/sink.py": ("1 << halvings - 1 - n",)},
    "one of at most 512 programs that fill 16 rows at a time": {"tile/rows.py": ("program * ROWS",)},
    "one of B H matrices; a launch has at least as many programs, and at most 2^31": {
        "hopper/backward/postprocess.py": ("b * H", "h // group * group"),
        "hopper/backward/preprocess.py": ("b * H",),
        "hopper/backward/add_dq.py": ("keys.b * shape.H",),
        "hopper/fp32/preprocess.py": ("b * H",),
        "hopper/backward/keys.py": ("w * tile.GROUP",),
        "tile/schedule.py": ("program // per_section * section",),
        "triton/backward.py": ("h_k * G", "H_k * G"),
        "triton/chunked/kernel.py": (
            "h_k * G", "H_k * G", "h_k * tile.G", "u * tile.G", "matrix * (chunk.key_tiles >> 1)",
        ),
    },
    "one of B H matrices or of B batch entries, whose q, k, v and o would fill 2^37 bytes": {
        "triton/single/kernel.py": ("b * (H_k * G)", "part * each"),
    },
    "one of all blocks of at least 64 rows, whose sums of dQ would fill 2^42 bytes": {
        "tile/rows.py": ("(b * H + h) * stride", "h * stride"),
        "hopper/backward/gqa_reduce.py": ("(block * 2 + W).to(gl.int64) * (tile.B_C * tile.D)",),
        "hopper/backward/deterministic.py": ("slot * SEMAPHORE_TILES",),
    },
    "a kibibyte of one program's dq_accum, which would fill 2^43 bytes": {
        "hopper/backward/add_dq.py": (
            "part * each", "(part + 1) * each", "tile.GROUP * shape.blocks * (tile.B_R * tile.D // 1024)",
        ),
    },
    "a number of the centres, (B, H_k, 128), whose keys' pieces would fill 2^40 bytes": {
        "hopper/fp32/preprocess.py": ("(b * H + h) * SIZE",),
        "hopper/fp32/split.py": ("(b * H + h) * SIZE",),
    },
    "a program's: `form_of` in host/values.py asks whether its offsets and numbers fit 32 bits": {
        "host/emit.py": ("a product of a program",),
    },
}  # fmt: skip
"""Products that stay, by reason and file. `python tests/triton/products.py` lists what there is."""
PORTABLE = ("forward", *(f"backward_{name}" for name in ("delta", "dkdv", "dq")))
HOPPER = (
    "forward", "backward", *(f"backward_{name}" for name in ("preprocess", "postprocess", "init_semaphore")),
    "split_fp32", "forward_fp32", "backward_preprocess_fp32", "backward_fp32",
)  # fmt: skip
BOTH = ("backward_renormalize", "backward_gather", "backward_sink", "list_tiles")
OTHER = "forward_single", "backward_single", "backward_chunk", "backward_chunk_sums"
KERNELS = {
    "experiment forward",
    "merge attention_merge",
    *(f"portable attention_{name}" for name in (*PORTABLE, *BOTH, *OTHER)),
    *(f"hopper attention_{name}" for name in HOPPER + BOTH),
}


def test_products_that_reach_an_address_have_64_bits_or_a_reason_and_all_may_fuse():
    """What products.py prints, under a Triton that fuses nothing unless it is asked to: so will Triton 3.10, and change
    numbers and times of kernels that do not say."""
    rows = lines("triton/products.py", TRITON_DEFAULT_FP_FUSION="0")
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["kernel"] for row in rows if not row["fused"]} == set()
    found = {(file, product): row["kernel"] for row in rows for file, product in row["products"]}
    allowed = {(file, one) for files in ALLOWED.values() for file, several in files.items() for one in several}
    new = {f"{found[at]}, {at[0]}: {at[1]}" for at in set(found) - allowed}
    assert not new, f"make them 64-bit, or say in ALLOWED why they stay below 2^31: {sorted(new)}"
    assert not allowed - set(found), "no longer there"
