"""studies/bench/parallel.py: rows below a bar are named, and ranks that hold more than the model says."""

from studies.bench import parallel

ROW = {
    "plan": "ring", "mask": "causal", "tokens": 1 << 16, "heads": (32, 8), "gpus": 8, "efficiency": 0.83,
    "peak_bytes": 30, "peak_bytes_of_share": 10, "bytes_of_model": 20,
}  # fmt: skip


def test_what_misses_a_bar_or_holds_too_much_is_named():
    assert parallel.below([ROW]) == []
    slow, large = ROW | {"efficiency": 0.81}, ROW | {"peak_bytes": 40}
    assert parallel.below([slow]) == ["ring 65536 (32, 8): 0.810 of ideal, below 0.82"]
    assert "holds 30 bytes besides" in parallel.below([large])[0]
    assert parallel.below([slow | {"gpus": 2}, ROW | {"gpus": 1, "efficiency": 0.0}]) == []


def test_the_best_plan_counts_where_documents_are_packed():
    packed = [
        ROW | {"mask": "documents", "plan": plan, "efficiency": e} for plan, e in (("ulysses", 0.9), ("ring", 0.5))
    ]
    assert parallel.below(packed) == []
    assert "documents 65536" in parallel.below(packed[1:])[0]
