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
        ({"dtype": torch.float32}, "fp16 and bf16"),
        ({"D": 60}, "multiples of 8"),
        ({"device": "sm_100"}, "written for sm_90"),
        ({"deterministic": True, "mask": DENSE}, "deterministic=True"),
    ],
)
def test_what_it_refuses_goes_to_the_portable_kernels(given, words):
    chosen, reasons = ask(**given)
    assert chosen == "triton"
    assert words in "; ".join(reasons)


@pytest.mark.parametrize("given", [{"S": 64}, {"deterministic": True, "mask": tw.Causal()}])
def test_it_takes_small_and_deterministic_calls(given):
    assert ask(**given)[0] == "hopper"


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
