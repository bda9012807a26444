"""What a launch takes for granted about masks, held against the masks themselves."""

import inspect
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from hopper.calls import call, problem

import tilewise as tw
from tilewise.call.backend import BACKWARD, FORWARD, planned
from tilewise.call.recipe import KINDS
from tilewise.hopper import by_gradient, by_keys
from tilewise.hopper.backward import scores as backward_scores
from tilewise.hopper.fp32 import backward_launch as fp32_backward_launch
from tilewise.hopper.fp32 import launch as fp32_launch
from tilewise.hopper.launch import backward_launches, forward_launches
from tilewise.hopper.parts import scores
from tilewise.hopper.plan import plan
from tilewise.hopper.tiles import BIAS, padded
from tilewise.host.gather import empty_sums
from tilewise.host.launch import Launch
from tilewise.host.outputs import empty_grads, empty_saved
from tilewise.host.values import device_values
from tilewise.tile.ranges import Variant
from tilewise.tile.softmax import LOG2E
from tilewise.values.listed import Listed

MASKS = (
    tw.Causal(), tw.Window(100, 0), tw.Causal() & tw.Window(1023, 0), tw.Window(100, 20), tw.Window(None, 0),
    tw.Causal() & tw.Padding(torch.tensor([150, 700])), tw.Prefix(torch.tensor([5, 300])),
)  # fmt: skip


def launched(M, N, D, **given):
    """The plan of a call on an H200."""
    return plan(problem(M, N, D, **given))


def tiles(seen, rows, columns):
    """Of every block of rows, its key tiles from the last that it sees, as pieces of `seen`."""
    for start in range(0, seen.shape[0], rows):
        block = seen[start : start + rows]
        shown = block.any(0).nonzero()
        if len(shown):
            last = int(shown.max()) // columns
            yield start, [block[:, t * columns : (t + 1) * columns] for t in range(last, -1, -1)]


@pytest.mark.parametrize("D", [64, 128])
def test_a_loop_over_many_heads_needs_the_mask_where_each_of_them_begins(D):
    for M, N in ((512, 512), (512, 1024), (300, 512)):
        assert launched(M, N, D, H_k=2, mask=tw.Causal()).backward_tile.MASK_IN_LOOP
        assert not launched(M, N, D, H_k=2).backward_tile.MASK_IN_LOOP


@pytest.mark.parametrize(
    ("M", "H", "H_k", "deterministic", "heads"),
    [
        (8192, 32, 4, False, 4),  # enough loops
        (8192, 32, 4, True, 2),
        (8192, 4, 1, False, 2),  # few programs, so that each takes fewer heads
        (8192, 12, 2, False, 3),  # a divisor of 6
        (8192, 16, 16, False, 1),
        (512, 64, 8, False, 4),
        (512, 16, 2, False, 4),  # short ones stay together, however few there are
        (64, 32, 1, False, 32),
    ],
)
def test_query_heads_that_share_keys_are_divided_among_programs(M, H, H_k, deterministic, heads):
    pl = launched(M, M, 128, H=H, H_k=H_k, mask=tw.Causal(), deterministic=deterministic)
    assert (pl.backward_tile.GROUP, pl.backward_tile.GQA_PROGRAMS) == (heads, H // H_k // heads)
    assert pl.backward_shape.heads == 2 * H // heads


@pytest.mark.parametrize(
    ("N", "mask", "chunks", "resident", "mebibytes"),
    [
        (8192, tw.Full(), 1, 4, 512),
        (8192, tw.Causal(), 1, 4, 258),  # two key tiles share a row of 129 tiles
        (8192, tw.Causal() & tw.Window(300, 0), 1, 4, 28),  # 7 blocks of queries see a key tile
        (16384, tw.Full(), 2, 3, 768),
        (16384, tw.Causal(), 2, 3, 385),
        (1024, tw.Full(), 1, 8, 16),  # all heads
    ],
    ids=str,
)
def test_a_few_sections_have_memory_for_ds(N, mask, chunks, resident, mebibytes):
    pl = launched(N, N, 192, D_v=128, mask=mask, backend="hopper")
    assert (pl.backward_shape.chunks, pl.backward_shape.resident) == (chunks, resident)
    assert by_gradient.tiles_of_ds(pl.backward_tile, pl.backward_shape) * 8192 >> 20 == mebibytes


def test_a_score_that_bounds_the_logits_spares_the_running_maximum():
    def bounded(dtype=torch.bfloat16, **given):
        return launched(512, 512, 128, dtype=dtype, **given).constants["tile"].BOUNDED

    slopes = tw.Alibi(torch.ones(4))
    assert bounded(score=tw.SoftCap(50.0))
    assert bounded(score=[slopes, tw.SoftCap(30.0)])
    for score in ((), tw.SoftCap(60.0), [tw.SoftCap(50.0), slopes]):
        assert not bounded(score=score)
    assert not bounded(torch.float16, score=tw.SoftCap(5.0)), "P may be larger than fp16's largest number"


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_what_is_left_out_is_what_the_mask_leaves_out(mask, D):
    found = set()
    for M, N in itertools.product((64, 300, 512, 1100), (64, 512, 576, 1100, 1536)):
        pl = launched(M, N, D, mask=mask)
        forward = pl.constants["tile"]
        seen = mask.dense(M, N).expand(2, 1, M, N)[:, 0]
        for b in range(2):
            for start, found_tiles in tiles(seen[b], 64, forward.B_C):
                if not forward.MASK_IN_LOOP:
                    assert all(bool(part.all()) for part in found_tiles[1:]), (M, N, start)
                if forward.HALF_FIRST_TILE and start % pl.forward.B_r == 0:
                    assert not bool(found_tiles[0][:, forward.B_C // 2 :].any()), (M, N, start)
            if D <= 128 and not pl.backward_tile.MASK_IN_LOOP:
                own = 64 if pl.backward_tile.HALF_LOOPS else pl.backward.B_c  # keys of one loop
                flipped = seen[b].flip(0, 1).T  # the first query tile that keys see becomes the last key tile
                if M % pl.backward.B_r == 0 and N % pl.backward.B_c == 0:
                    for start, found_tiles in tiles(flipped, own, pl.backward.B_r):
                        assert all(bool(part.all()) for part in found_tiles[1:]), (M, N, start)
        found.add((forward.MASK_IN_LOOP, forward.HALF_FIRST_TILE))
    if mask.parts == (mask,) and isinstance(mask, tw.Causal):
        assert (False, D != 256) in found, "square calls have a loop without a mask"


@pytest.mark.parametrize("mask", [*MASKS, tw.Full()], ids=str)
def test_a_mask_is_past_where_it_shows_no_key_after_its_query(mask):
    M, N = 300, 512
    later = torch.arange(N) > torch.arange(M)[:, None] + N - M
    assert problem(M, N, 64, mask=mask).past == (not bool((mask.dense(M, N) & later).any()))


def test_alibi_takes_no_sign_off_where_the_mask_hides_later_keys():
    slopes = torch.ones(4)

    def chosen(mask, own):
        _, ((fn, *_),), _ = device_values(problem(512, 512, 64, mask=mask, score=tw.Alibi(slopes)), (slopes,), own)
        return inspect.getsource(fn.fn)

    for own in (scores, backward_scores, None):
        assert "tl.abs" in chosen(tw.Full(), own)
        assert "tl.abs" not in chosen(tw.Causal(), own)


@pytest.mark.parametrize(
    ("M", "batch", "options", "section"),
    [
        (197, 166, {}, 16),
        (1024, 4, {}, 4),
        (1024, 2, {}, 16),
        (1024, 12, {"mask": tw.Causal()}, 4),
        (1024, 8, {"mask": tw.Causal()}, 16),
        (256, 16, {"mask": tw.Causal()}, 16),
        (4096, 4, {"mask": tw.Causal()}, 2),
        (4096, 4, {"mask": tw.Window(255, 0)}, 1),
        (1024, 4, {"deterministic": True}, 16),
    ],
)
def test_few_matrices_run_at_once_where_every_multiprocessor_has_many_tiles(M, batch, options, section):
    p = problem(M, M, 128, H=16, H_k=16, batch=(batch,), **options)
    assert plan(p).backward_shape.section == section


def test_packed_sequences_run_as_many_heads_at_once_as_divide_all():
    ends = torch.tensor([0, 1000, 2000], dtype=torch.int32)
    p = problem(2000, 2000, 128, H=12, H_k=12, batch=(), layout=tw.Varlen(ends, ends, 1000, 1000))
    assert plan(p).backward_shape.section == 12


@pytest.mark.parametrize(("D", "section"), [(64, 128), (128, 48)])
def test_short_causal_heads_run_in_sections_by_head_size(D, section):
    for M in (64, 197, 512):
        assert launched(M, M, D, mask=tw.Causal()).shape.section == section


def test_the_first_tile_is_located_early_only_if_no_tensor_tells_where_it_is():
    ends = torch.tensor([0, 100, 200], dtype=torch.int32)
    for options in ({}, {"mask": tw.Causal()}, {"mask": tw.Window(100, 0)}, {"score": tw.SoftCap(30.0)}):
        assert launched(1024, 1024, 128, **options).constants["tile"].LOCATE_EARLY
    packed = problem(200, 200, 128, batch=(), layout=tw.Varlen(ends, ends, 100, 100))
    cached = problem(64, 256, 128, layout=tw.Cached(torch.tensor([100, 200], dtype=torch.int32)))
    assert not plan(packed).constants["tile"].LOCATE_EARLY
    assert not plan(cached).constants["tile"].LOCATE_EARLY
    padded = tw.Padding(torch.tensor([150, 700]))
    for options in ({"mask": padded}, {"mask": tw.Dense(torch.ones(1024, 1024, dtype=torch.bool))}, {"dropout": 0.1}):
        assert not launched(1024, 1024, 128, **options).constants["tile"].LOCATE_EARLY


def test_under_a_narrow_window_postprocess_has_processors_of_its_own():
    def programs(mask, M=8192, H=16):
        p = problem(M, M, 128, H=H, H_k=H, mask=mask)
        return by_keys.main_programs(p, plan(p).backward_shape)

    within = tw.Causal() & tw.Window(511, 511), tw.Causal() & tw.Window(900, None)
    for narrow in (tw.Window(1022, 0), tw.Window(300, 700), *within):
        assert programs(narrow) == 132 - by_keys.POSTPROCESS_PROCESSORS
    for wide in (tw.Full(), tw.Causal(), tw.Window(1024, 0), tw.Window(512, 512), tw.Window(8, None)):
        assert programs(wide) == 132
    assert programs(tw.Window(127, 0), M=2048) == 132, "four tiles a processor end at four times anyway"
    assert programs(tw.Window(15, 0), M=512) == 128, "no more than there are tiles"


@pytest.mark.parametrize("scale", [None, 0.3, 0.0])
def test_the_exponent_or_the_first_score_takes_the_scale(scale):
    wanted = 64**-0.5 if scale is None else scale
    assert launched(256, 256, 64, scale=scale).c == pytest.approx(wanted * LOG2E.value)
    options = {"scale": scale, "score": [tw.SoftCap(5.0), tw.SoftCap(4.0)]}
    _, changes, _ = device_values(problem(256, 256, 64, **options), ())
    assert [score.unit for score in changes] == [wanted, 1.0]
    assert launched(256, 256, 64, **options).c == LOG2E.value


@dataclass(frozen=True, eq=False)
class CausalListed(tw.Mask):
    """Causal, whose tiles are listed all the same; it has no tensor."""

    interval = False
    varlen = False

    @staticmethod
    def rule(b, h, i, j):
        return j <= i


@pytest.mark.parametrize("mask", [CausalListed(), tw.Causal()], ids=lambda mask: type(mask).__name__)
def test_a_mask_without_tensors_is_listed_for_every_call(mask, monkeypatch):
    """Such a variant holds no tensor but its lists, which every call writes."""
    monkeypatch.setitem(KINDS, "CausalListed", CausalListed)
    p, x = call(512, 512, 64, mask=mask)
    listed = isinstance(mask, CausalListed)
    for _ in range(2):
        *before, main = forward_launches(p, plan(p), x, empty_saved(p, x, None), torch.zeros(2, dtype=torch.int32))
        assert [launch.kernel.fn.__name__ for launch in before] == ["attention_list_tiles"] * listed
        (variant,) = [a for a in main.arguments if hasattr(a, "lists")]
        assert (variant.lists is not None) == listed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_listed_mask_has_two_lists_which_no_launch_writes_again(dtype, monkeypatch):
    """One by query for the forward, one by key for the backward, each with the tiles of its kernel."""
    mask = tw.Documents(*[torch.zeros(2, 512, dtype=torch.int32)] * 2) & tw.Causal()
    p, x = call(512, 512, 64, mask=mask, dtype=dtype)
    written = []
    monkeypatch.setattr(Launch, "run", lambda launch, _: written.append(launch.kernel.fn.__name__))
    lists = *planned(p, FORWARD).lists(x), *planned(p, BACKWARD).lists(x)
    assert written == ["attention_list_tiles"] * 2
    assert [one.by_key for one in lists] == [False, True]
    p, x = call(512, 512, 64, mask=Listed(mask, lists), dtype=dtype)
    counter, saved = torch.zeros(2, dtype=torch.int32), empty_saved(p, x, None)
    if dtype == torch.float32:
        pl = fp32_launch.plan(p)
        keys = fp32_backward_launch.empty_keys(p, x.q.device)
        scratch = fp32_backward_launch.empty_scratch(p, x.q.device)
        of_forward = fp32_launch.forward_launches(p, pl, x, saved, keys, counter)
        back = fp32_backward_launch.sizes_of(p).row
        of_backward = fp32_backward_launch.launches(p, pl, x, saved, saved.o, None, scratch, empty_grads(p, x), counter)
    else:
        pl = plan(p)
        of_forward, back = forward_launches(p, pl, x, saved, counter), pl.backward
        scratch = pl.empty_scratch(p, x.q.device)
        of_backward = backward_launches(p, pl, x, saved, saved.o, None, scratch, empty_grads(p, x), counter)
    assert (lists[0].B_r, lists[0].B_c) == (pl.forward.B_r, pl.forward.B_c)
    assert (lists[1].B_r, lists[1].B_c) == (back.B_r, back.B_c)
    given = []
    for launch in (*of_forward, *of_backward):
        assert launch.kernel.fn.__name__ != "attention_list_tiles"
        given += [a.lists.ptr for a in launch.arguments if isinstance(a, Variant)]
    assert [id(one) for one in given] == [id(one.tiles) for one in lists]


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("biased", [True, False])
def test_logits_with_a_bias_are_shifted_from_shared_memory(biased, D):
    """The kernel of the bias's gradient has a score that subtracts lse instead."""
    score = tw.Bias(torch.zeros(4, 512, 512)) if biased else tw.SoftCap(20.0)
    p, x = call(512, 512, D, score=score)
    p = p._replace(wanted=(True,) * biased)
    pl, grads, saved = plan(p), empty_grads(p, x), empty_saved(p, x, None)
    scratch, counter = pl.empty_scratch(p, x.q.device), torch.zeros(2, dtype=torch.int32)
    sums = empty_sums(p, x, grads, BIAS[padded(p)]) if biased else []
    found = backward_launches(p, pl, x, saved, saved.o, None, scratch, grads, counter, sums)
    assert (scratch.shift is not None) == biased
    scores = {one.kernel.fn.__name__: len(a.scores) for one in found for a in one.arguments if isinstance(a, Variant)}
    assert scores["attention_backward" if D == 128 else "attention_backward_by_gradient"] == 1
    assert scores.get("attention_backward_gather") == (2 if biased else None)


def test_a_margin_leaves_multiprocessors_free():
    code = "import torch; from tilewise.hopper.counts import processors; print(processors(torch.device('cpu')))"
    for margin, expected in (("0", "132"), ("8", "124"), ("500", "1")):
        environment = {**os.environ, "TILEWISE_MARGIN": margin}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


@pytest.mark.parametrize(("D", "D_v", "parts"), [(512, 512, 2), (264, 128, 1), (64, 272, 2)])
def test_head_sizes_above_256(D, D_v, parts):
    """Each part of V's columns is a tile of its own; the backward is the portable kernels'."""
    q, v = (torch.empty(2, 512, 8, size, dtype=torch.bfloat16, device="meta") for size in (D, D_v))

    def told(backend, **given):
        return tw.explain(q, q, v, device="sm_90", backend=backend, **given)

    found = told(None)
    assert found.backend == "hopper"
    tiles = found.tiles
    assert f"V in {parts} x 256 columns; backward on the portable kernels" in tiles
    assert "backward in chunks of" in tiles
    assert told("hopper", dropout=0.1).backend is None
    p = problem(512, 512, D, D_v=D_v, backend="hopper")
    pl = plan(p)
    assert pl.backward is None
    assert pl.programs == min(132, 2 * 4 * 4 * parts)
    assert [box.block_shape[2:] for box in pl.boxes] == [[64, 64], [64, 64], [64, 256], [64, 256]]


def test_rows_lie_in_pieces():
    """Those of codes, and of sizes without a row in the tables, are padded."""
    q, v = (torch.empty(2, 512, 8, D, dtype=torch.bfloat16, device="meta") for D in (192, 128))
    assert "rows of 192 and 128 columns in pieces" in str(tw.explain(q, q, v, device="sm_90"))
    for D, D_v, columns in ((192, 128, (192, 128, 192)), (200, 128, (256, 256, 256)), (72, 80, (96, 96, 96))):
        pl = plan(problem(512, 512, D, D_v=D_v))
        assert (pl.constants["tile"].D, pl.constants["tile"].D_V, pl.backward_tile.D) == columns
    coded = plan(problem(512, 512, 192, D_v=128, backend="hopper", precision="int8"))
    assert coded.constants["tile"].D == 256
