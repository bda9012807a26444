"""FlexAttention's names on tilewise: each result is that of PyTorch's, computed eagerly on the CPU."""

import inspect
import math

import pytest
import torch
from program.functions import B, H, M, N, examples
from test_messages import FORM
from torch.nn.attention import flex_attention as theirs

import tilewise as tw
from tilewise.compat import flex
from tilewise.compat.flex import BlockMask, create_block_mask, create_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:return_lse is deprecated", "ignore:flex_attention called without")
EXAMPLES = examples()
MASKS = [name for name, example in EXAMPLES.items() if example.what == "mask" and name != "everything"]
SCORES = [name for name, example in EXAMPLES.items() if example.what == "score"]


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """PyTorch's flex_attention computes at once, without Dynamo."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def operands(m=M, n=N, h_k=H, h=H, learn=False, b=B):
    draw = torch.Generator().manual_seed(m + n)
    shapes = (b, h, m, 8), (b, h_k, n, 8), (b, h_k, n, 6)
    return [torch.randn(shape, generator=draw).requires_grad_(learn) for shape in shapes]


def close(mine, wanted, **tolerance):
    for x, y in zip(mine, wanted, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_torch(name):
    """By the function, by torch's lists of blocks, and as a dense tensor; blocks cut rows and keys."""
    x, mod = operands(), EXAMPLES[name].closed
    listed = theirs.create_block_mask(mod, B, H, M, N, "cpu", BLOCK_SIZE=4)
    kept = create_block_mask(mod, B, H, M, N, "cpu", BLOCK_SIZE=4)
    assert torch.equal(kept.to_dense(), listed.to_dense())
    wanted = theirs.flex_attention(*x, block_mask=listed, return_lse=True)
    for block_mask in (kept, listed, create_block_mask(mod, None, None, M, N)):
        close(flex_attention(*x, block_mask=block_mask, return_lse=True), wanted)


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_torch(name):
    x, mod = operands(), EXAMPLES[name].closed
    wanted = theirs.flex_attention(*x, score_mod=mod, scale=0.3, return_lse=True)
    close(flex_attention(*x, score_mod=mod, scale=0.3, return_lse=True), wanted, atol=3e-5, rtol=3e-5)


def plain(x, learned, score=None, seen=None, scale=0.3):
    """o, lse and gradients in torch's own operations, of functions on index tensors."""
    q, k, v = x
    b, h, i, j = [torch.arange(size) for size in (*q.shape[:3], k.shape[2])]
    at = b[:, None, None, None], h[:, None, None], i[:, None], j
    k, v = [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v)]
    S = q @ k.mT * scale
    S = S if score is None else score(S, *at)
    S = S if seen is None else S.masked_fill(~seen(*at), -math.inf)
    lse = S.logsumexp(3)
    o = (S - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp() @ v
    return o, lse, *torch.autograd.grad(o.square().sum() + (lse.masked_fill(lse.isneginf(), 0.0) ** 2).sum(), learned)


def mine(x, learned, **options):
    o, lse = flex_attention(*x, scale=0.3, enable_gqa=True, return_lse=True, **options)
    return o, lse, *torch.autograd.grad(o.square().sum() + (lse.masked_fill(lse.isneginf(), 0.0) ** 2).sum(), learned)


@pytest.mark.parametrize("mask", ["window", "document", "natten"])
@pytest.mark.parametrize("score", ["softcap", "relative", "t5", "forgetting", "swin"])
def test_gradients_are_those_of_autograd(score, mask):
    """Of q, k, v, of captured tensors and through lse; key heads are shared, and some rows see nothing."""
    x, example, seen = operands(h_k=1, learn=True), EXAMPLES[score], EXAMPLES[mask].closed
    learned = [*x, *[t for t in example.tensors if t.requires_grad]]
    wanted = plain(x, learned, example.closed, seen)
    block_mask = create_block_mask(seen, None, None, M, N)
    close(mine(x, learned, score_mod=example.closed, block_mask=block_mask), wanted, atol=2e-5, rtol=2e-5)


def natten(b, h, i, j, side=20):
    return (abs(i // side - j // side) <= 3) & (abs(i % side - j % side) <= 3)


DOC = torch.arange(400).div(90, rounding_mode="floor") * torch.tensor([[1], [2]])
LONG = {
    "causal": lambda b, h, i, j: i >= j,
    "documents": flex.and_masks(lambda b, h, i, j: DOC[b, i] == DOC[b, j], lambda b, h, i, j: i >= j),
    "global and window": flex.or_masks(lambda b, h, i, j: j < 3, lambda b, h, i, j: abs(i - j) <= 40 * (h + 1)),
    "natten": natten,
    "nothing": flex.or_masks(),
    "everything": flex.and_masks(flex.noop_mask),
}


@pytest.mark.parametrize(("m", "n"), [(300, 300), (150, 400), (390, 130)])
@pytest.mark.parametrize("name", LONG)
def test_lengths_need_not_divide(name, m, n):
    """Several tiles; four query heads for two of keys; queries and keys both count from 0."""
    x, mod = operands(m, n, h_k=2, h=4), LONG[name]
    listed = theirs.create_block_mask(mod, B, 4, m, n, "cpu")
    wanted = theirs.flex_attention(*x, block_mask=listed, enable_gqa=True, return_lse=True)
    for block_mask in (listed, create_block_mask(mod, None, None, m, n)):
        close(flex_attention(*x, block_mask=block_mask, enable_gqa=True, return_lse=True), wanted)


def listed_blocks(full=False):
    """Lists of 4 of 8 blocks for 6 blocks of rows, in any order; what follows the counted ones is of no matter."""
    draw = torch.Generator().manual_seed(3)
    indices = torch.stack([torch.randperm(8, generator=draw) for _ in range(B * H * 6)]).view(B, H, 6, 8).int()
    return torch.full((B, H, 6), 2 if full else 4, dtype=torch.int32), indices.roll(4, 3) if full else indices


def dense_of(counts, indices, rows, keys):
    table = torch.zeros(B, H, 6, 8, dtype=torch.bool)
    table.scatter_(3, indices.long(), torch.arange(8).expand(B, H, 6, 8) < counts[..., None])
    return table.repeat_interleave(rows, 2).repeat_interleave(keys, 3)


@pytest.mark.parametrize("mod", [None, lambda b, h, i, j: i + 3 >= j], ids=["whole", "with a function"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("m", "n"), [(96, 64), (90, 61)])
def test_lists_of_blocks_are_the_mask(m, n, full, mod):
    """The function cuts blocks of the first lists, not those of the full ones; PyTorch's object says the same."""
    lists = (*listed_blocks(), *(listed_blocks(True) if full else ()))
    options = {"BLOCK_SIZE": (16, 8), "mask_mod": mod, "seq_lengths": (m, n)}
    seen = dense_of(*lists[:2], 16, 8)[:, :, :m, :n]
    seen = seen if mod is None else seen & create_mask(mod, B, H, m, n)
    seen = seen | dense_of(*lists[2:], 16, 8)[:, :, :m, :n] if full else seen
    x = operands(m, n, learn=True)
    wanted = plain(x, x, seen=lambda *_: seen)
    for made in (BlockMask, theirs.BlockMask):
        found = made.from_kv_blocks(*lists, **options)
        close(mine(x, x, block_mask=found), wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(BlockMask.of(found).to_dense(), BlockMask.from_kv_blocks(*lists, **options).to_dense())


def test_one_list_serves_all_entries_and_heads():
    counts, indices = [t[0, 0] for t in listed_blocks()]
    found = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16)
    assert (found.shape, found.BLOCK_SIZE) == ((1, 1, 96, 128), (16, 16))
    wanted = theirs.BlockMask.from_kv_blocks(counts[None, None], indices[None, None], BLOCK_SIZE=16)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    assert found.sparsity() == pytest.approx(wanted.sparsity())
    q, k, v = operands(96, 128)
    o = flex_attention(q, k[:1], v[:1], block_mask=found)  # so may one of keys
    torch.testing.assert_close(o, flex_attention(q, *[t[:1].expand(B, -1, -1, -1) for t in (k, v)], block_mask=wanted))


@pytest.mark.parametrize(
    "index", [0, -1, slice(1, 2), (1, 2), (slice(None), slice(0, 2)), (0, 1, torch.tensor([2, 0]))]
)
@pytest.mark.parametrize("lists", [False, True])
def test_a_part_of_a_mask_is_the_mask_of_a_part(lists, index):
    def mod(b, h, i, j):
        return (i + b >= j) & (h + j > 2)

    if lists:
        whole = BlockMask.from_kv_blocks(*listed_blocks(), BLOCK_SIZE=4, mask_mod=mod)
    else:
        whole = create_block_mask(mod, B, H, 24, 32, BLOCK_SIZE=4)
    part, index = whole[index], index if isinstance(index, tuple) else (index,)
    at = [torch.arange(size)[[n] if isinstance(n, int) else n] for size, n in zip((B, H, 6), index, strict=False)]
    dense = whole.to_dense()
    for dim, kept in enumerate(at):
        dense = dense.index_select(dim, kept)
    assert torch.equal(part.to_dense(), dense)
    assert part.shape[:2] == tuple(dense.shape[:2])


def test_a_step_of_generation_takes_a_row_of_blocks_and_another_function():
    """As programs with a static cache do: a slice, then its function and lengths are set."""
    whole = create_block_mask(LONG["causal"], 1, 1, 300, 300)
    for position in (torch.tensor(7), torch.tensor(290)):
        step = whole[:, :, position // 128]
        step.mask_mod = lambda b, h, i, j, at=position: whole.mask_mod(b, h, i + at, j)
        step.seq_lengths = (1, 300)
        q, k, v = operands(1, 300)
        found = flex_attention(q, k, v, block_mask=step)
        seen = position + 1
        torch.testing.assert_close(found, theirs.flex_attention(q, k[:, :, :seen], v[:, :, :seen]))


def test_masks_and_scores_of_tilewise_serve_too():
    x = operands(60, 60)
    cap = tw.SoftCap(2.0)
    wanted = theirs.flex_attention(
        *x, EXAMPLES["softcap"].closed, theirs.create_block_mask(LONG["causal"], 1, 1, 60, 60, "cpu")
    )
    torch.testing.assert_close(flex_attention(*x, cap, tw.Causal()), wanted)
    moved = create_block_mask(LONG["documents"], B, None, 60, 60).to("cpu")
    assert torch.equal(moved.to_dense(), create_block_mask(LONG["documents"], B, None, 60, 60).to_dense())


def test_without_graph_breaks_where_values_are_made_outside():
    """The mask and a Score are constants of the graph; captured tensors learn."""
    torch.compiler.reset()
    x, example = operands(learn=True), EXAMPLES["relative"]
    block_mask, score = create_block_mask(EXAMPLES["prefix_lm"].closed, B, None, M, N), tw.Score.of(example.closed)

    def forward(*x):
        o, aux = flex_attention(*x, score, block_mask, return_aux=flex.AuxRequest(lse=True))
        return o.square().sum() + aux.lse.sum()

    found, wanted = torch.compile(forward, backend="aot_eager", fullgraph=True)(*x), forward(*x)
    learned = [*x, *[t for t in example.tensors if t.requires_grad]]
    close(*[(y, *torch.autograd.grad(y, learned)) for y in (found, wanted)], atol=0, rtol=0)


def test_functions_within_a_graph_break_it():
    torch.compiler.reset()
    x = operands()

    def forward(*x):
        block_mask = create_block_mask(LONG["causal"], None, None, M, N)
        return flex_attention(*x, EXAMPLES["relative"].closed, block_mask)

    torch.testing.assert_close(torch.compile(forward, backend="eager")(*x), forward(*x))


def test_what_is_returned():
    x = operands()
    o = flex_attention(*x)
    assert o.shape == (B, H, M, 6)
    lse = flex_attention(*x, return_lse=True)[1]
    for request in (flex.AuxRequest, theirs.AuxRequest):
        found, aux = flex_attention(*x, return_aux=request(lse=True))
        close((found, aux.lse), (o, lse), atol=0, rtol=0)
        assert flex_attention(*x, return_aux=request())[1] == (None, None)
    assert flex_attention(*[t.double() for t in x], return_lse=True)[1].dtype == torch.float64


def test_names_and_arguments_are_those_of_torch():
    assert set(flex.__all__) == set(theirs.__all__)
    for name in ("flex_attention", "create_block_mask", "create_mask", "BlockMask.from_kv_blocks"):
        mine, other = [inspect.signature(eval(name, vars(module))).parameters for module in (flex, theirs)]
        assert list(mine) == list(other)
        assert {p.name: p.default for p in mine.values()} == {p.name: p.default for p in other.values()}


def call(block_mask=None, **options):
    return flex_attention(
        *operands(**{key: options.pop(key) for key in ("h_k",) if key in options}), block_mask=block_mask, **options
    )


COUNTS, INDICES = listed_blocks()
WRONG = {
    "a mask for other lengths": (lambda: call(create_block_mask(natten, 1, 1, 9, N)), ValueError, r"\(9, 17\)"),
    "a function as block_mask": (lambda: call(natten), TypeError, "create_block_mask"),
    "fewer heads of keys": (lambda: call(h_k=1), ValueError, "enable_gqa"),
    "three dimensions": (lambda: flex_attention(*[t[0] for t in operands()]), ValueError, "query"),
    "the greatest logits": (lambda: call(return_aux=flex.AuxRequest(max_scores=True)), ValueError, "max_scores"),
    "lse twice": (lambda: call(return_aux=flex.AuxRequest(), return_lse=True), ValueError, "return_lse"),
    "a score as a mask": (lambda: create_block_mask(EXAMPLES["alibi"].fn, 1, 1, 9, 9), TypeError, "alibi"),
    "lists without counts": (lambda: BlockMask.from_kv_blocks(None, INDICES), TypeError, "kv_indices"),
    "full lists alone": (lambda: BlockMask.from_kv_blocks(COUNTS, INDICES, COUNTS), TypeError, "full_kv_indices"),
    "counts of other rows": (lambda: BlockMask.from_kv_blocks(COUNTS[:1], INDICES), ValueError, "kv_indices"),
    "too few rows of lists": (
        lambda: BlockMask.from_kv_blocks(COUNTS, INDICES, BLOCK_SIZE=4, seq_lengths=(25, 32)), ValueError, "7 blocks"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_with_a_sentence(name):
    attempt, kind, words = WRONG[name]
    with pytest.raises(kind, match=words) as caught:
        attempt()
    assert FORM.fullmatch(str(caught.value))
