"""Masks, scores and layouts as values: they compare, move between devices, and are saved and loaded."""

import io
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.call.recipe import KINDS
from tilewise.values.by_head import BlockTable
from tilewise.values.intervals import PaddingKeys, PaddingLengths, PrefixAt
from tilewise.values.layout import PADDED
from tilewise.values.listed import Listed, TileList
from tilewise.values.score import AlibiAt

NEW = (
    "padding range", "list", "listed", "prefix at", "alibi at", "spans", "cached", "quantized", "eight bits",
    "mask of", "or", "not", "score of", "spans by head", "blocks", "block table",
)  # fmt: skip
"""Values that 0.1.0 did not have."""
OLD = Path(__file__).parent / "data" / "from_0_1_0"
"""What version 0.1.0 wrote, under torch 2.13: `values()` by pickle and by torch.save, and an exported graph."""
TENSORS = {
    "prefix": torch.tensor([4, 9]),
    "lengths": torch.tensor([4, 0]),
    "starts": torch.tensor([1, 0]),
    "more lengths": torch.tensor([9, 14]),
    "block lists": torch.tensor([[[[0, -1, 1]], [[1, -1, -1]]]]),
    "block table": torch.tensor([[[[True, False]], [[True, True]]]]),
    "real": torch.tensor([[True, False, True]]),
    "q_ids": torch.tensor([[0, 1]]),
    "k_ids": torch.tensor([[0, 0, 1]]),
    "tiles": torch.tensor([[[[1, 0, 0]]]], dtype=torch.int32),
    "seen": torch.tensor([[True, False], [True, True]]),
    "slopes": torch.tensor([0.5, 0.25]),
    "bias": torch.tensor([0.0, 1.0, -1.0]),
    "cu_q": torch.tensor([0, 5, 12], dtype=torch.int32),
    "cu_k": torch.tensor([0, 4, 9], dtype=torch.int32),
    "in use": torch.tensor([4, 9], dtype=torch.int32),
    "table": torch.tensor([[1, -1], [0, 2]], dtype=torch.int32),
    "codes": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn).view(1, 1, 1, 2),
    "mean": torch.tensor([[0.5, 2.0]]),
}


def seen_by(b, h, i, j, real, n, x):
    return real[b, j] & (i * x > n)


def bent(s, b, h, i, j, slopes, low):
    return torch.where(i < j, s * slopes[h], low)


def values(of=TENSORS):
    """One of each kind, made of the given tensors."""
    return {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "window": tw.Window(3, None),
        "prefix": tw.Prefix(of["prefix"]),
        "prefix at": PrefixAt.rebuild((3,), (of["prefix"],)),
        "spans": tw.Spans(of["q_ids"], of["k_ids"]),
        "spans by head": tw.Spans(of["block lists"], of["block lists"]),
        "blocks": tw.Blocks(of["block lists"], (16, 32)),
        "block table": BlockTable.rebuild((16, 32), (of["block table"],)),
        "padding": tw.Padding(of["lengths"]),
        "padding range": tw.Padding(of["lengths"], starts=of["starts"]),
        "padding bool": tw.Padding(of["real"]),
        "documents": tw.Documents(of["q_ids"], of["k_ids"]),
        "dense": tw.Dense(of["seen"]),
        "list": TileList(of["tiles"], False, 16, 16, 2, 2),
        "listed": Listed(tw.Dense(of["seen"]), (TileList(of["tiles"], False, 16, 16, 2, 2),)),
        "and": tw.Causal() & tw.Window(5, 0) & tw.Padding(of["more lengths"]),
        "mask of": tw.Mask.of(seen_by, of["real"], 2, 0.5, align="last"),
        "or": tw.Causal() | tw.Window(5, 0) & tw.Padding(of["more lengths"]),
        "not": ~tw.Documents(of["q_ids"], of["k_ids"]),
        "score of": tw.Score.of(bent, of["slopes"], -math.inf),
        "softcap": tw.SoftCap(2.5),
        "alibi": tw.Alibi(of["slopes"]),
        "alibi at": AlibiAt.rebuild((3,), (of["slopes"],)),
        "bias": tw.Bias(of["bias"]),
        "varlen": tw.Varlen(of["cu_q"], of["cu_k"], 7, None),
        "cached": tw.Cached(of["in use"], of["table"], starts=of["in use"], invariant=64),
        "quantized": tw.Quantized(of["codes"], of["slopes"]),
        "eight bits": tw.EightBits("int8", of["mean"], of["mean"], interleaved=True),
    }


def leaves(value):
    """Class names, numbers and tensors of a value, in order."""
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    if hasattr(value, "__match_args__") and not isinstance(value, torch.Tensor):
        return [type(value).__name__, *leaves(tuple(getattr(value, name) for name in value.__match_args__))]
    return [value]


def same(a, b):
    """Whether two values hold the same classes and numbers, and tensors of equal contents."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("name", values())
def test_equal_values_have_one_class_equal_numbers_and_the_same_tensors(name):
    value, again, copied = values()[name], values()[name], values({n: t.clone() for n, t in TENSORS.items()})[name]
    captures = any(isinstance(leaf, torch.Tensor) for leaf in leaves(value))
    assert value == again
    assert hash(value) == hash(again)
    assert (value == copied) != captures
    assert [other for other in values() if values()[other] == value] == [name]
    assert value != 1


def test_other_numbers_are_another_value():
    assert tw.Window(3, None) != tw.Window(3, 0) != tw.Window(None, 0)
    assert tw.Window(3, 0) & tw.Causal() != tw.Causal() & tw.Window(3, 0)
    assert tw.SoftCap(2) == tw.SoftCap(2.0) != tw.SoftCap(2.5)
    assert len({tw.Causal(), tw.Causal(), tw.Window(1, 0), tw.Window(1, 0), tw.SoftCap(2)}) == 3


@pytest.mark.parametrize("name", values())
def test_to_moves_every_tensor(name):
    value = values()[name]
    moved = value.to("meta")
    assert type(moved) is type(value)
    kinds = [leaf.device.type if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(moved)]
    assert kinds == ["meta" if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(value)]
    assert value.to(torch.device("cpu")) == value


@pytest.mark.parametrize("name", values())
def test_torch_load_takes_values_with_its_defaults(name):
    file = io.BytesIO()
    torch.save(values()[name], file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), values()[name])
    if name != "quantized":  # pickle alone reads no tensor of 8-bit floats, whosever it is
        assert same(pickle.loads(pickle.dumps(values()[name])), values()[name])


@pytest.mark.parametrize("name", [name for name in values() if name not in NEW])
def test_values_saved_by_0_1_0_load(name):
    pickled = pickle.loads((OLD / "values.pickle").read_bytes())
    saved = torch.load(OLD / "values.pt", weights_only=True)
    assert same(pickled[name], values()[name])
    assert same(saved[name], values()[name])
    if not isinstance(pickled[name], tw.Varlen):
        assert pickled[name].to("cpu") == pickled[name]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.13 wrote the file, and older ones may not read it")
def test_a_graph_exported_by_0_1_0_loads():
    x = torch.randn(2, 11, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 8)
    lengths = torch.tensor([11, 3])
    program = torch.export.load(OLD / "layer.pt2")
    mask = tw.Causal() & tw.Window(5, 0) & tw.Padding(lengths)
    expected = tw.attention(*x, mask=mask, score=tw.SoftCap(3.0))
    torch.testing.assert_close(program.module()(*x, lengths), expected)


def test_padding_is_a_class_of_two_kinds():
    by_length, by_key = tw.Padding(TENSORS["lengths"]), tw.Padding(keys=TENSORS["real"])
    assert isinstance(by_length, tw.Padding)
    assert isinstance(by_key, tw.Padding)
    assert (type(by_length), type(by_key)) == (PaddingLengths, PaddingKeys)
    assert not isinstance(tw.Causal(), tw.Padding)
    with pytest.raises(AttributeError):
        by_length.lengths = TENSORS["more lengths"]


def test_every_kind_is_found_by_its_name():
    others = (
        tw.Full,
        tw.Blocks,
        Listed,
        type(tw.Causal() & tw.Causal()),
        tw.Varlen,
        tw.Cached,
        tw.Quantized,
        tw.EightBits,
    )
    shown = {type(value) for value in values().values()} - {*others}
    assert set(KINDS.values()) == shown
    assert all(name == kind.__name__ for name, kind in KINDS.items())


@pytest.mark.parametrize("name", [name for name, value in values().items() if type(value) in KINDS.values()])
def test_a_value_declares_what_its_rule_reads(name):
    value = values()[name]
    assert len(value.traced.tensors) == len(value.tensors) == len(value.shapes)
    sizes = SimpleNamespace(B=2, H=2, M=2, N=value.tensors[-1].shape[-1] if value.captures else 3, layout=PADDED)
    whole = value.whole_shapes(sizes, value.plain[1:])
    assert [len(shape) for shape in value.shapes] == [len(shape) for shape in whole]
    for tensor, shape in zip(value.tensors, value.shapes, strict=True):
        assert tensor.ndim == len(shape) or value.broadcasts or (value.unbatched and tensor.ndim == len(shape) - 1)


def test_numpys_integers_are_integers():
    assert tw.Window(np.int64(3), np.int32(0)) == tw.Window(3, 0)
    assert tw.Varlen(TENSORS["cu_q"], TENSORS["cu_k"], np.int64(7), np.uint8(5)) == tw.Varlen(
        TENSORS["cu_q"], TENSORS["cu_k"], 7, 5
    )
    assert type(tw.Window(np.int64(3), 0).left) is int
    for wrong in (True, 3.0, torch.tensor(3), "3"):
        with pytest.raises(TypeError, match="Window: left"):
            tw.Window(wrong, 0)


def test_a_compiled_function_makes_compares_and_hides_values():
    def call(q, lengths):
        mask = tw.Causal() & tw.Padding(lengths)
        score = tw.SoftCap(2.0) if mask != tw.Causal() and isinstance(mask.masks[1], tw.Padding) else ()
        return tw.attention(q, q, q, mask=mask, score=score)

    q, lengths = torch.randn(2, 8, 2, 8), torch.tensor([5, 8])
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, lengths), call(q, lengths))


def test_a_value_given_to_a_compiled_function_is_guarded():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, mask: tw.attention(q, q, q, mask=mask), fullgraph=True, backend=count)
    q = torch.randn(1, 8, 2, 8)
    for mask in (tw.Causal(), tw.Causal(), tw.Window(2, 0), tw.Window(1, 0), tw.Causal()):
        torch.testing.assert_close(compiled(q, mask), tw.attention(q, q, q, mask=mask))
    assert len(graphs) == 3
