"""What the Hopper back end takes, and the reasons that it gives for the rest; no GPU is needed to ask."""

import pytest
import torch

import tilewise as tw

DENSE = tw.Dense(torch.ones(4096, 4096, dtype=torch.bool, device="meta"))


def ask(B=2, S=4096, H=16, D=128, dtype=torch.bfloat16, device="sm_90", **options):
    """What would run a call of these sizes, and Hopper's reasons against it."""
    q = torch.empty(B, S, H, D, dtype=dtype, device="meta")
    found = tw.explain(q, q, q, device=device, **options)
    return found.backend, found.refusals.get("hopper")


def test_it_takes_calls_of_every_kind():
    lengths = torch.tensor([7, 9])
    ids = torch.zeros(2, 4096, dtype=torch.int32)
    for mask in (
        tw.Full(), tw.Causal(), tw.Window(64, 0), tw.Prefix(lengths), tw.Padding(lengths), tw.Documents(ids, ids),
        tw.Dense(torch.ones(4096, 4096, dtype=torch.bool)),
    ):  # fmt: skip
        q = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16)
        found = tw.explain(
            q, q, q, device="sm_90", mask=mask, score=[tw.SoftCap(30.0)], dropout=0.1, sink=q[0, 0, :, 0]
        )
        assert found.backend == "hopper", found
    assert "warpgroups" in found.tiles


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": torch.float32, "D": 136}, "head sizes up to 128, got 136"),
        ({"dtype": torch.float32, "precision": "tf32x3"}, "bf16x6 and fp16x3, not in tf32x3"),
        ({"dtype": torch.float32, "dropout": 0.1}, "no scores and no dropout"),
        ({"dtype": torch.float32, "score": tw.SoftCap(30.0)}, "no scores and no dropout"),
        ({"D": 60}, "multiples of 8"),
        ({"device": "sm_100"}, "written for sm_90"),
        ({"deterministic": True, "mask": DENSE}, "deterministic=True"),
    ],
)
def test_what_it_refuses_goes_to_the_portable_kernels(given, words):
    chosen, reasons = ask(**given)
    assert chosen == "triton"
    assert words in "; ".join(reasons)


@pytest.mark.parametrize(("given", "words"), [
    ({"D": 264, "dropout": 0.1}, "head sizes up to 256, got 264 and 264; backend='triton' takes larger ones"),
    ({"D": 512, "dtype": torch.float16, "dropout": 0.1}, "head sizes up to 256, got 512 and 512"),
    ({"D": 512, "dtype": torch.float32}, "head sizes up to 128, got 512 and 512"),
])  # fmt: skip
def test_head_sizes_above_256_are_refused_also_by_name(given, words):
    for options in ({"backend": "hopper"}, {"backend": "triton"}):
        chosen, reasons = ask(**given, **options)
        assert chosen == (None if options["backend"] == "hopper" else "triton")
        assert words in "; ".join(reasons)


def ask_cache(page=64, dtype=None, M=256, **layout):
    """What would run queries on keys in pages, or in one piece, and what Hopper says."""
    q = torch.empty(2, M, 16, 128, dtype=torch.bfloat16)
    k = torch.empty(8, page or 512, 4, 128, dtype=dtype or q.dtype)
    ints = [torch.zeros(shape, dtype=torch.int32) for shape in ((2,), (2, 4))]
    given = dict.fromkeys(layout.pop("tensors", ()), ints[0])
    where = tw.Cached(ints[0], ints[1] if page else None, **given, **layout)
    keys = (k, k) if k.dtype == q.dtype else [tw.Quantized(k, torch.ones(()))] * 2
    for backend in (None, "hopper"):
        found = tw.explain(q, *keys, mask=tw.Causal(), layout=where, device="sm_90", backend=backend)
        yield found.backend, "; ".join(found.refusals.get("hopper", ())), found.tiles


@pytest.mark.parametrize(("given", "tiles"), [
    ({}, "pages of 64, 2 look-ups a tile"), ({"page": 8}, "pages of 8, 16 look-ups a tile"), ({"page": 0}, "programs"),
    ({"page": 256}, "pages of 256, 1 look-up a tile"), ({"page": 0, "tensors": ("starts", "index")}, "keys not split"),
])  # fmt: skip
def test_it_reads_caches_where_a_sequence_fills_a_warpgroup(given, tiles):
    (chosen, why, told), _ = ask_cache(**given)
    (for_few, _, _), (named, _, _) = ask_cache(M=63, **given)
    (on_few, _, _), _ = ask_cache(M=128, **given)  # one tile for each of 32 heads
    assert (chosen, for_few, on_few, named) == ("hopper", "triton", "triton", "hopper")
    assert not why
    assert tiles in told


@pytest.mark.parametrize(("given", "words"), [
    ({"page": 12}, "a multiple of 8 rows, got 12"), ({"tensors": ("starts",)}, "not from starts"),
    ({"invariant": 64}, "as invariant asks"), ({"dtype": torch.float8_e4m3fn}, "in q's type, got float8_e4m3fn"),
])  # fmt: skip
def test_caches_that_it_does_not_read_are_refused_also_by_name(given, words):
    (chosen, _, _), (named, why, _) = ask_cache(**given)
    assert (chosen, named) == ("triton", None)
    assert words in why


@pytest.mark.parametrize("given", [{"S": 72}, {"deterministic": True, "mask": tw.Causal()}])
def test_it_takes_small_and_deterministic_calls(given):
    assert ask(**given)[0] == "hopper"


def test_of_the_shortest_calls_each_back_end_runs_the_pass_in_which_it_is_faster():
    for D, S, forward, backward in (
        (64, 64, "hopper", "triton"), (64, 65, "hopper", "hopper"), (128, 32, "triton", "triton"),
        (128, 33, "hopper", "triton"), (128, 65, "hopper", "hopper"), (256, 64, "hopper", "hopper"),
    ):  # fmt: skip
        q = torch.empty(2, S, 16, D, dtype=torch.bfloat16, device="meta")
        found = tw.explain(q, q, q, device="sm_90")
        assert (found.backend, found.backward) == (forward, backward), found
        assert ("runs this" in str(found)) == (forward == backward)
        assert found.tiles
        assert found.backward_tiles
        named = tw.explain(q, q, q, device="sm_90", backend="hopper")
        assert named.backend == named.backward == "hopper"


def test_addresses_that_tma_cannot_reach_are_named():
    wide = torch.empty(2, 4096, 16, 2 * 128 + 1, dtype=torch.bfloat16)
    k = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16)
    for q, words in (
        (wide[..., :128], "no positive multiple of 16 bytes"),
        (wide[..., : 2 * 128 : 2], "entries are not adjacent"),
        (k[:, :, :1].expand(2, 4096, 16, 128), "a stride of 0"),
    ):
        found = tw.explain(q, k, k, device="sm_90")
        assert found.backend == "triton"
        assert any(reason.startswith("q ") and words in reason for reason in found.refusals["hopper"])


@pytest.mark.parametrize(
    ("setting", "given", "products"),
    [
        ("highest", {}, "bf16x6"),
        ("high", {}, "fp16x3"),
        ("medium", {}, "fp16x3"),
        ("highest", {"precision": "fp16x3"}, "fp16x3"),
        ("high", {"precision": "bf16x6"}, "bf16x6"),
    ],
)
def test_it_takes_fp32_at_the_precision_asked_for(setting, given, products):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        q = torch.empty(2, 512, 4, 72, dtype=torch.float32, device="meta")
        sink = torch.empty(4, device="meta")
        found = tw.explain(q, q, q, device="sm_90", mask=tw.Causal(), sink=sink, **given)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.backend == "hopper", found
    assert f"products in {products}" in found.tiles
