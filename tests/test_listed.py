"""Masks that carry lists of their tiles: the same results, and one launch of `attention_list_tiles` per list."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.call import calls
from tilewise.call.recipe import KINDS
from tilewise.values.listed import Listed

B, M, N, H, D = 2, 40, 70, 2, 16
IDS = torch.arange(N).expand(B, -1) // 25
MASKS = {
    "dense": lambda: tw.Dense(torch.rand(M, N) < 0.02),
    "dense by head": lambda: tw.Dense(torch.rand(B, H, M, N) < 0.02),
    "documents": lambda: tw.Documents(IDS[:, -M:], IDS),
    "bools": lambda: tw.Padding(torch.rand(B, N) < 0.5),
    "causal and dense": lambda: tw.Causal() & tw.Dense(torch.rand(H, M, N) < 0.3),
    "three": lambda: tw.Documents(IDS[:, -M:], IDS) & tw.Padding(torch.rand(B, N) < 0.5) & tw.Window(30, 5),
}


def operands(dtype=torch.float32, B=B, M=M, N=N, D=D):
    return [torch.randn(B, length, H, D, dtype=dtype, requires_grad=True) for length in (M, N, N)]


def interpreted():
    """Skip a test unless Triton's interpreter runs kernels."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("runs in Triton's interpreter")


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched, in order."""
    interpreted()
    from tilewise.host.launch import Launch

    names, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, *at: names.append(self.kernel.fn.__name__) or run(self, *at))
    return names


def results(x, mask, **options):
    o, lse = tw.attention(*x, mask=mask, return_lse=True, **options)
    return o, lse, *torch.autograd.grad(o.sum() + lse.exp().sum(), x)


def agree(x, mask, listed, **options):
    for one, other in zip(results(x, mask, **options), results(x, listed, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_the_same_bit_by_bit(name, dtype):
    interpreted()
    x, mask = operands(dtype), MASKS[name]()
    listed = tw.listed(mask, *x, backend="triton")
    assert isinstance(listed, Listed)
    assert torch.equal(listed.dense(M, N), mask.dense(M, N))
    agree(x, mask, listed, backend="triton")
    agree(x, mask, listed)  # the CPU needs no lists, and has no use for them


@pytest.mark.parametrize("name", MASKS)
def test_the_cpu_gets_the_mask_itself(name):
    mask = MASKS[name]()
    assert tw.listed(mask, *operands()) is mask
    assert tw.listed(mask, *operands(), backend="cpu") is mask


def test_an_interval_mask_needs_no_lists():
    mask = tw.Causal() & tw.Padding(torch.tensor([3, 70]))
    assert tw.listed(mask, *operands(), backend="triton") is mask


def test_layers_share_one_list_per_kernel(launched):
    x, mask = operands(), MASKS["documents"]()
    listed = tw.listed(mask, *x, backend="triton")
    assert 0 < len(launched) <= 3
    assert set(launched) == {"attention_list_tiles"}
    launched.clear()
    q, k, v = x
    for _ in range(3):
        q = tw.attention(q, k, v, mask=listed, backend="triton")
    q.sum().backward()
    assert launched.count("attention_forward") == launched.count("attention_backward_dq") == 3
    assert "attention_list_tiles" not in launched


def test_without_gradients_only_the_forward_is_listed(launched):
    x, mask = operands(), MASKS["dense"]()
    with torch.no_grad():
        listed = tw.listed(mask, *x, backend="triton")
        tw.attention(*x, mask=listed, backend="triton")
    assert launched == ["attention_list_tiles", "attention_forward"]
    with pytest.raises(ValueError, match=r"by key, got .*with gradients enabled"):
        results(x, listed, backend="triton")


def test_meta_tensors_tell_shapes_and_types():
    interpreted()
    x, mask = operands(torch.float16), MASKS["dense by head"]()
    listed = tw.listed(mask, *[t.detach().to("meta") for t in x], backend="triton")
    assert [one.tiles.device.type for one in listed.lists] == ["cpu"] * len(listed.lists)
    agree(x, mask, listed, backend="triton")


@dataclass(frozen=True, eq=False)
class Below(tw.Mask):
    """A mask without tensors, whose tiles are listed: what Causal shows."""

    interval = False
    varlen = False

    @staticmethod
    def rule(b, h, i, j):
        return j <= i


def test_a_mask_without_tensors_is_listed_where_q_is_or_where_asked(monkeypatch):
    interpreted()
    monkeypatch.setitem(KINDS, "Below", Below)
    x, mask = operands(), Below()
    meta = [t.detach().to("meta") for t in x]
    agree(x, mask, tw.listed(mask, *x, backend="triton"), backend="triton")
    agree(x, mask, tw.listed(mask, *meta, device="cpu", backend="triton"), backend="triton")
    assert tw.listed(mask, *meta, device="cpu") is mask
    assert tw.listed(tw.Causal(), *meta) == tw.Causal()
    with pytest.raises(ValueError, match="listed: device must be where the calls will be, got meta; pass"):
        tw.listed(mask, *meta, backend="triton")
    with pytest.raises(ValueError, match="listed: device must be the mask's cpu, got meta; pass"):
        tw.listed(MASKS["documents"](), *x, device="meta")


def test_a_mask_listed_for_another_call_is_refused():
    interpreted()
    listed = tw.listed(tw.Padding(torch.rand(B, N) < 0.5), *operands(), backend="triton")
    with pytest.raises(ValueError, match="listed for 39 queries and 70 keys, got one for 40 and 70"):
        tw.attention(*operands(M=39), mask=listed, backend="triton")
    with pytest.raises(ValueError, match="Padding"):
        tw.attention(*operands(B=3), mask=listed, backend="triton")
    with pytest.raises(ValueError, match="tiles"):
        tw.attention(*operands(B=3, N=70), mask=Listed(tw.Full(), listed.lists), backend="triton")


def test_a_mask_listed_for_other_tiles_is_refused(monkeypatch):
    interpreted()
    from tilewise.triton import plan as planning

    x, mask = operands(), MASKS["documents"]()
    listed = tw.listed(mask, *x, backend="triton")
    calls.forget()
    rows = planning.current
    monkeypatch.setattr(planning, "current", lambda p: rows(p)._replace(forward=planning.Tiles(16, 16, 4, 1)))
    with pytest.raises(ValueError, match="tiles of 16x16 by query, got 32x32 by query, 32x32 by key; call"):
        tw.attention(*x, mask=listed, backend="triton")
    calls.forget()


def test_a_combination_has_no_lists_and_a_listed_mask_is_listed_anew():
    interpreted()
    x, mask = operands(), MASKS["dense"]()
    listed = tw.listed(mask, *x, backend="triton")
    for combined in (listed & tw.Causal(), tw.Causal() & listed):
        assert combined.tile_lists == ()
        agree(x, mask & tw.Causal(), combined, backend="triton")
    again = tw.listed(listed, *x, backend="triton")
    assert again.mask is mask
    assert listed.to("cpu").mask == mask.to("cpu")


def test_a_mask_is_listed_from_real_tensors():
    interpreted()
    mask = tw.Dense(torch.ones(M, N, dtype=torch.bool))
    q, k, v = (t.detach() for t in operands())

    def call(q):
        return tw.attention(q, k, v, mask=tw.listed(mask, q, k, v, backend="triton"), backend="triton")

    with pytest.raises(tw.Unsupported, match="subclasses of Tensor"):
        torch.func.vmap(call)(q[None])


def test_vmap_and_checkpoints_use_the_lists(launched):
    x, mask = operands(), MASKS["causal and dense"]()
    listed = tw.listed(mask, *x, backend="triton")
    launched.clear()

    def call(q, k, v, mask=listed):
        return tw.attention(q, k, v, mask=mask, backend="triton")

    stacked = [torch.stack([t.detach(), 2 * t.detach()]) for t in x]
    assert torch.equal(torch.func.vmap(call)(*stacked)[1], call(*[part[1] for part in stacked]))
    o = checkpoint(call, *x, use_reentrant=False)
    grads = torch.autograd.grad(o.sum(), x)
    assert "attention_list_tiles" not in launched
    for one, other in zip(grads, torch.autograd.grad(call(*x, mask=mask).sum(), x), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_function_takes_a_listed_mask(launched):
    x, mask = operands(), MASKS["documents"]()
    listed = tw.listed(mask, *x, backend="triton")
    launched.clear()
    compiled = torch.compile(
        lambda q, k, v, mask: tw.attention(q, k, v, mask=mask, backend="triton"), fullgraph=True, backend="aot_eager"
    )
    grads = torch.autograd.grad(compiled(*x, listed).sum(), x)
    assert "attention_list_tiles" not in launched
    o = tw.attention(*x, mask=mask, backend="triton")
    for one, other in zip(grads, torch.autograd.grad(o.sum(), x), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_function_lists_on_the_cpu():
    x, mask = operands(), MASKS["bools"]()

    def call(q, k, v):
        return tw.attention(q, k, v, mask=tw.listed(mask, q, k, v))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*x), call(*x))


def test_a_compiled_function_breaks_its_graph_to_list_tiles(launched):
    x, mask = operands(), MASKS["bools"]()

    def call(q, k, v):
        return tw.attention(q, k, v, mask=tw.listed(mask, q, k, v, backend="triton"), backend="triton")

    assert torch.equal(torch.compile(call, backend="aot_eager")(*x), call(*x))
    assert "attention_list_tiles" in launched


def test_a_whole_graph_cannot_list_tiles():
    interpreted()
    x, mask = operands(), MASKS["bools"]()
    compiled = torch.compile(lambda q: tw.listed(mask, q, *x[1:], backend="triton"), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give its result to the compiled function"):
        compiled(x[0])


def test_the_operator_takes_lists():
    interpreted()
    from tilewise.call.check import check_arguments

    x, mask = operands(), MASKS["dense by head"]()
    listed = tw.listed(mask, *x, backend="triton")
    given, recipe, longest = check_arguments(*x, listed, (), None, None, 0.0, None, None, False, "triton")
    arguments = (*given[:3], list(given.extra), None, recipe.encode(), *longest)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(torch.ops.tilewise.attention, arguments, test_utils=checks).values()) == {
        "SUCCESS"
    }


def test_lists_go_with_a_bias_a_sink_and_dropout():
    interpreted()
    x, mask = operands(), MASKS["causal and dense"]()
    learned = {"score": tw.Bias(torch.randn(H, M, N, requires_grad=True)), "sink": torch.randn(H, requires_grad=True)}
    options = {**learned, "dropout": 0.3, "seed": 5, "backend": "triton"}
    agree(x, mask, tw.listed(mask, *x, **options), **options)


def test_a_place_that_changes_the_mask_leaves_its_lists_out():
    interpreted()
    x, ids, origin = operands(B=1, N=M), torch.zeros(1, M, dtype=torch.int64), tw.Origin(row=48, column=50)
    mask = tw.Documents(ids, ids) & tw.Prefix(torch.tensor([M]))  # at the place, it is no longer wholly visible
    agree(x, mask, tw.listed(mask, *x, backend="triton"), origin=origin, backend="triton")


def test_functions_on_the_cpu_need_no_lists():
    """Also without tensors, and with q on the meta device where the calls' device is given."""
    x = operands()
    meta = [t.detach().to("meta") for t in x]
    mask = tw.Mask.of(lambda b, h, i, j: (i + j) % 3 == 0)
    assert tw.listed(mask, *x) is mask
    assert tw.listed(mask, *meta, device="cpu") is mask
    assert (
        tw.listed(lambda b, h, i, j: j <= i, *x).traced.program.text
        == tw.Mask.of(lambda b, h, i, j: j <= i).traced.program.text
    )
    with pytest.raises(ValueError, match="listed: device must be where the calls will be, got meta; pass"):
        tw.listed(mask, *meta)
