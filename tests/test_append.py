"""append_ and copy_pages_: exact, in their place and nowhere else, on the CPU and in Triton."""

import pytest
import torch

import tilewise as tw
from tilewise.append import op

PATHS = ("torch", "kernel")


@pytest.fixture(params=PATHS)
def device(request, monkeypatch):
    """Run by torch, or by the kernel: on a GPU, or in the interpreter."""
    if request.param == "kernel":
        if torch.cuda.is_available():
            return "cuda"
        kernel, in_torch = op.launch_module("append"), op.append_in_torch

        def run(call, y):
            """As on a GPU."""
            return kernel.launch(call, y) if len(call.layout.lengths) else in_torch(call, y)

        monkeypatch.setattr(op, "append_in_torch", run)
    return "cpu"


def draw(device, queries, packed, H=4, H_k=2, D=32, D_v=16, dtype=torch.float32):
    rows = (sum(queries) + 2,) if packed else (len(queries), queries[0])
    tensors = [torch.randn(*rows, heads, size) for heads, size in ((H, D), (H_k, D), (H_k, D_v))]
    return [t.to(dtype).to(device) for t in tensors]


def expected(cache, new, lengths, queries, table, index, starts, packed):
    """What a cache holds afterwards, row by row."""
    cache, first = cache.clone(), 0
    for b, m in enumerate(queries):
        entry = index[b] if index else b
        capacity = cache.shape[1] * (table.shape[1] if table is not None else 1)
        for i in range(m):
            r = lengths[b] - m + i
            if (starts[b] if starts else 0) <= r < capacity:
                value = new[first + i] if packed else new[b, i]
                if table is None:
                    cache[entry, r] = value
                else:
                    cache[table[entry, r // cache.shape[1]].item(), r % cache.shape[1]] = value
        first += m
    return cache


@pytest.mark.parametrize("rotary", ["no", "halves", "neighbours", "part"])
@pytest.mark.parametrize(
    ("queries", "lengths", "table", "index", "starts", "packed"),
    [
        ((1, 1, 1), (32, 1, 90), True, None, None, False),
        ((5, 5, 5), (34, 3, 98), True, None, None, False),
        ((1, 5, 0, 20), (32, 5, 7, 80), True, None, None, True),
        ((4, 4), (60, 98), False, (1, 0), (3, 96), False),
        ((4, 4), (60, 98), True, (1, 0), None, False),
    ],
)
def test_exactly_its_rows_are_written(device, queries, lengths, table, index, starts, packed, rotary):
    torch.manual_seed(0)
    q, k_new, v_new = draw(device, queries, packed)
    B, P = len(queries), 16
    shape = (6 * B + 1, P) if table else (B, 6 * P)
    k, v = (torch.randn(*shape, 2, size, device=device) for size in (32, 16))
    pages = torch.randperm(6 * B, device=device).view(B, 6).int() if table else None
    cu = torch.tensor((0, *queries), device=device).cumsum(0).int() if packed else None
    layout = tw.Cached(torch.tensor(lengths, device=device), pages, cu_q=cu,
                       index=torch.tensor(index, device=device) if index else None,
                       starts=torch.tensor(starts, device=device) if starts else None)  # fmt: skip
    R = {"no": 0, "part": 12}.get(rotary, 32)
    angles = torch.randn(200, R // 2, device=device)
    given, rotated = {}, k_new
    if R:
        given = {"cos": angles.cos(), "sin": angles.sin(), "interleaved": rotary == "neighbours", "q": q}
        offsets = torch.tensor([n - m for n, m in zip(lengths, queries, strict=True)], device=device)
        options = {"interleaved": rotary == "neighbours", "offsets": offsets + 10, "cu_seqlens": cu}
        rows = slice(0, sum(queries)) if packed else slice(None)
        longer = torch.cat([angles[:1].expand(10, -1), angles])  # rows before 0 read the first angle
        want_q, rotated = tw.rotary_qk(q[rows], k_new[rows], longer.cos(), longer.sin(), **options)
    want = [expected(*args, lengths, queries, pages, index, starts, packed) for args in ((k, rotated), (v, v_new))]
    got = tw.append_(k, v, k_new, v_new, layout=layout, **given)
    if R:
        torch.testing.assert_close(got[rows], want_q, atol=1e-6, rtol=0)
    else:
        assert got is None
    torch.testing.assert_close(k, want[0], atol=1e-6 if R else 0, rtol=0)
    assert torch.equal(v, want[1])


PAGES, OF_1 = ((0, 1), (3, 5)), [(3, 2), (3, 3), (5, 0), (5, 1)]
NOWHERE = {
    "no page": ({"lengths": (8, 6), "table": ((0, -1), (3, 5))}, OF_1),
    "a page that is not there": ({"lengths": (8, 6), "table": ((0, 77), (3, 5))}, OF_1),
    "no row of the table": ({"lengths": (8, 6), "table": PAGES, "index": (-1, 1)}, OF_1),
    "a row of the table that is not there": ({"lengths": (8, 6), "table": PAGES, "index": (2, 1)}, OF_1),
    "no entry": ({"lengths": (4, 4), "index": (-1, 2)}, [(2, 0), (2, 1), (2, 2), (2, 3)]),
    "an entry that is not there": ({"lengths": (4, 4), "index": (9, 2)}, [(2, 0), (2, 1), (2, 2), (2, 3)]),
    "a length below 0": ({"lengths": (-1, 4)}, [(1, 0), (1, 1), (1, 2), (1, 3)]),
    "rows before the first offset": ({"lengths": (4, 4), "cu_q": (2, 3, 5)}, [(0, 3), (1, 2), (1, 3)]),
    "offsets that fall": ({"lengths": (4, 4), "cu_q": (0, 3, 1)}, [(0, 1), (0, 2), (0, 3)]),
    "offsets behind the rows": ({"lengths": (4, 4), "cu_q": (0, 1, 9)}, [(0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]),
}
"""Layouts in which some of 2 x 4 new keys, packed 5, have no place; and the entries and rows that the others have."""


def nowhere(name, device):
    """A layout, six entries or pages of keys and of values, new ones, and which rows these get."""
    parts, written = NOWHERE[name]
    layout = tw.Cached(**{part: torch.tensor(numbers, device=device) for part, numbers in parts.items()})
    k, v = torch.zeros(6, 4, 2, 8, device=device), torch.zeros(6, 4, 2, 6, device=device)
    new = torch.ones(*((2, 4) if layout.cu_q is None else (5,)), 2, 8, device=device)
    return layout, k, v, new, written


@pytest.mark.parametrize("name", NOWHERE)
def test_what_attention_refuses_append_refuses(name):
    layout, k, v, new, _ = nowhere(name, "cpu")
    said = []
    for call in (
        lambda: tw.append_(k, v, new, new[..., :6], layout=layout),
        lambda: tw.attention(new, k, v, layout=layout),
    ):
        with pytest.raises(ValueError, match=r"Cached: (\w+|lengths and starts) must") as error:
            call()
        said.append(str(error.value))
    assert said[0] == said[1]
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("name", NOWHERE)
def test_keys_without_a_place_are_dropped_where_nothing_is_checked(device, name, monkeypatch):
    monkeypatch.setattr(op, "check_contents", lambda *_: None)
    layout, k, v, new, written = nowhere(name, device)
    zeros = torch.zeros(9, 4, device=device)
    assert torch.equal(tw.append_(k, v, new, new[..., :6], layout=layout, cos=zeros + 1, sin=zeros, q=new), new)
    for t in (k, v):
        assert [tuple(place) for place in t.all(-1).all(-1).nonzero().tolist()] == written
        assert t.count_nonzero() == len(written) * t[0, 0].numel()


def test_a_window_leaves_pages_that_nothing_reads_or_writes():
    k, v, new = torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2, 8), torch.ones(1, 2, 2, 8)
    layout = tw.Cached(torch.tensor([11]), torch.tensor([[-1, -1, 3, -1]]))
    tw.append_(k, v, new, new, layout=layout)
    assert torch.equal(tw.attention(new, k, v, mask=tw.Causal() & tw.Window(1, 0), layout=layout)[0, 1], new[0, 1])
    with pytest.raises(ValueError, match=r"table must have pages in \[0, 6\)"):
        tw.attention(new, k, v, mask=tw.Causal() & tw.Window(2, 0), layout=layout)


def test_a_step_is_append_and_attention(device):
    torch.manual_seed(0)
    q, k_new, v_new = draw(device, (3, 3), False, D_v=32)
    k, v = (torch.zeros(2, 40, 2, 32, device=device) for _ in range(2))
    k[:, :20], v[:, :20] = torch.randn(2, 20, 2, 32, device=device), torch.randn(2, 20, 2, 32, device=device)
    want = [torch.cat([t[:, :20], new], 1) for t, new in ((k, k_new), (v, v_new))]
    layout = tw.Cached(torch.tensor([23, 23], device=device))
    assert tw.append_(k, v, k_new, v_new, layout=layout) is None
    got = tw.attention(q, k, v, mask=tw.Causal(), layout=layout)
    torch.testing.assert_close(got, tw.attention(q, *want, mask=tw.Causal()), atol=2e-6, rtol=0)


@pytest.mark.parametrize("B", [0, 1])
def test_keys_of_no_sequence_are_dropped(device, B):
    """Also where there is none at all; q is rotated by the first angle there."""
    q, k_new, v_new = draw(device, (1,), True)
    k, v = (torch.zeros(4, 16, 2, size, device=device) for size in (32, 16))
    layout = tw.Cached(torch.zeros(B, dtype=torch.int32, device=device),
                       cu_q=torch.zeros(B + 1, dtype=torch.int32, device=device))  # fmt: skip
    angles = torch.randn(50, 16, device=device)
    got = tw.append_(k, v, k_new, v_new, layout=layout, cos=angles.cos(), sin=angles.sin(), q=q)
    first = angles[:1].expand(len(q), -1)
    torch.testing.assert_close(got, tw.rotary(q[None], first.cos(), first.sin())[0])
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(device, dtype):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no bf16")
    q, k_new, v_new = draw(device, (3, 3), False, dtype=dtype)
    k, v = (torch.zeros(2, 40, 2, size, device=device, dtype=dtype) for size in (32, 16))
    angles = torch.randn(50, 16, device=device)
    layout = tw.Cached(torch.tensor([3, 30], device=device))
    got = tw.append_(k, v, k_new, v_new, layout=layout, cos=angles.cos(), sin=angles.sin(), q=q)
    offsets = torch.tensor([0, 27], device=device)
    want, rotated = tw.rotary_qk(q, k_new, angles.cos(), angles.sin(), offsets=offsets)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(k[1, 27:30], rotated[1], atol=1e-3, rtol=1e-2)
    assert torch.equal(v[0, :3], v_new[0])


@pytest.mark.parametrize("shape", [(), (2,), (3, 2)], ids=str)
def test_8_bits_are_rounded_to_nearest_even_and_saturated(device, shape):
    if device == "cpu" and op.append_in_torch.__name__ == "run":
        pytest.skip("the interpreter rounds e4m3 otherwise")
    _, k_new, v_new = draw(device, (2, 2, 2), False)
    k_new[0, 0, 0, :3] = torch.tensor([1e4, -1e4, 0.0])
    scale = torch.rand(shape, device=device) + 0.1
    pages = [
        tw.Quantized(torch.zeros(3, 16, 2, size, device=device).to(torch.float8_e4m3fn), scale) for size in (32, 16)
    ]
    tw.append_(*pages, k_new, v_new, layout=tw.Cached(torch.tensor([2, 9, 16], device=device)))
    for page, new in zip(pages, (k_new, v_new), strict=True):
        want = (new / scale.expand(3, 2)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        for b, end in enumerate((2, 9, 16)):
            assert torch.equal(page.x[b].float()[end - 2 : end], want[b])
    assert pages[0].x.float().abs().max() == 448


def test_one_operator_that_says_what_it_changes():
    q, k_new, v_new = draw("cpu", (1, 1), False)
    k, v = torch.zeros(4, 16, 2, 32), torch.zeros(4, 16, 2, 16)
    layout = tw.Cached(torch.tensor([5, 20]), torch.tensor([[0, 1], [2, 3]]))
    angles = torch.randn(50, 16)
    arguments = (k, v, k_new, v_new, list(layout.tensors), repr(layout.plain[1]), angles.cos(), angles.sin(), False, q)
    torch.library.opcheck(torch.ops.tilewise.append_, arguments)

    def step(q, k, v, lengths):
        own = tw.Cached(lengths, layout.table)
        rotated = tw.append_(k, v, k_new, v_new, layout=own, cos=angles.cos(), sin=angles.sin(), q=q)
        return tw.attention(rotated, k, v.repeat(1, 1, 1, 2), mask=tw.Causal(), layout=own)

    caches = [t.clone() for t in (k, v)]
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *caches, layout.lengths)
    torch.testing.assert_close(got, step(q, k, v, layout.lengths))
    assert torch.equal(caches[0], k)
    assert k.any()


def test_pages_are_copied_after_all_are_read():
    k, v = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 3)
    before = k.clone(), v.clone()
    tw.copy_pages_(k, v, torch.tensor([0, 1]), torch.tensor([1, 0], dtype=torch.int32))
    assert torch.equal(k, before[0][[1, 0, 2, 3, 4]])
    assert torch.equal(v, before[1][[1, 0, 2, 3, 4]])


@pytest.mark.parametrize("quantized", [False, True])
def test_pages_in_8_bits_are_copied_bit_by_bit(quantized):
    k, v = (torch.randn(5, 4, 2, size).to(torch.float8_e4m3fn) for size in (8, 3))
    before = [t.float() for t in (k, v)]
    given = [tw.Quantized(t, torch.ones(())) if quantized else t for t in (k, v)]
    tw.copy_pages_(*given, torch.tensor([0, 1]), torch.tensor([1, 3]))
    for t, was in zip((k, v), before, strict=True):
        assert torch.equal(t.float(), was[[0, 0, 2, 1, 4]])


@pytest.mark.parametrize("part", [slice(0, 5), slice(3, 8)])
def test_pages_of_values_inside_the_keys_are_copied_once(part):
    """As where values are the first columns of keys."""
    k = torch.randn(5, 4, 2, 8)
    before = k.clone()
    tw.copy_pages_(k, k[..., part], torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))
    assert torch.equal(k, before[[0, 0, 1, 2, 4]])


def test_a_compiled_function_copies_pages():
    k, v = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 3)
    want = k[[1, 1, 2, 3, 4]]
    copy = torch.compile(tw.copy_pages_, fullgraph=True, backend="aot_eager")
    copy(k, v, torch.tensor([1]), torch.tensor([0]))
    assert torch.equal(k, want)


def pages(source, target):
    return lambda: tw.copy_pages_(K, V, torch.tensor(source), torch.tensor(target))


K, V, NEW, LAYOUT = (
    torch.zeros(2, 8, 2, 4),
    torch.zeros(2, 8, 2, 4),
    torch.zeros(2, 1, 2, 4),
    tw.Cached(torch.tensor([1, 2])),
)
E4M3 = K.to(torch.float8_e4m3fn)
WRONG = {
    "layout must be a Cached": lambda: tw.append_(K, V, NEW, NEW, layout=None),
    "k must be a torch.Tensor": lambda: tw.append_(None, V, NEW, NEW, layout=LAYOUT),
    "v must be a torch.Tensor": lambda: tw.append_(K, None, NEW, NEW, layout=LAYOUT),
    "k_new must be a torch.Tensor": lambda: tw.append_(K, V, None, NEW, layout=LAYOUT),
    "v_new must be a torch.Tensor": lambda: tw.append_(K, V, NEW, None, layout=LAYOUT),
    "q must be a torch.Tensor": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, q=3.0),
    "k and v must agree in all but": lambda: tw.append_(K, V[:1], NEW, NEW, layout=LAYOUT),
    "k and v must agree in all but the": lambda: tw.append_(K, V[:, :4], NEW, NEW, layout=LAYOUT),
    "k must have shape": lambda: tw.append_(K[0], V[0], NEW, NEW, layout=LAYOUT),
    "k must have an entry": lambda: tw.append_(K[:1], V[:1], NEW, NEW, layout=LAYOUT),
    "k must be fp16": lambda: tw.append_(E4M3, E4M3, NEW, NEW, layout=LAYOUT),
    "k's scale must have shape": lambda: tw.append_(
        tw.Quantized(E4M3, torch.ones(7)), tw.Quantized(E4M3, torch.ones(())), NEW, NEW, layout=LAYOUT
    ),
    "k_new must have shape": lambda: tw.append_(K, V, NEW[0], NEW, layout=LAYOUT),
    "v_new must have k_new's rows": lambda: tw.append_(K, V, NEW, NEW.repeat(1, 2, 1, 1), layout=LAYOUT),
    "k_new must have the cache's heads": lambda: tw.append_(K, V, NEW[..., :2], NEW, layout=LAYOUT),
    "v_new must be of the cache's type": lambda: tw.append_(K, V, NEW, NEW.half(), layout=LAYOUT),
    "k must have adjacent entries": lambda: tw.append_(torch.zeros(2, 8, 4, 2).mT, V, NEW, NEW, layout=LAYOUT),
    "cos must be given with sin": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, q=NEW),
    "cos and sin must have one shape": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, cos=K[0, 0], sin=V[0]),
    "cos and sin must have between": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, cos=K[0, 0], sin=K[0, 0]),
    "cos and sin must have a row": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, cos=K[0, :0, 0, :1],
                                                      sin=K[0, :0, 0, :1]),
    "cos must be a tensor": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, cos=3.0, sin=4.0),
    "v's scale must be finite and > 0": lambda: tw.append_(
        tw.Quantized(E4M3, torch.ones(2)), tw.Quantized(E4M3, torch.tensor([1.0, 0.0])), NEW, NEW, layout=LAYOUT
    ),
    "source must be a tensor of type int32": lambda: tw.copy_pages_(K, V, [1], torch.tensor([0])),
    "k must be a torch": lambda: tw.copy_pages_(None, V, torch.tensor([1]), torch.tensor([0])),
    "k and v must agree": lambda: tw.copy_pages_(K, V[:1], torch.tensor([1]), torch.tensor([0])),
    "source must hold pages in": pages([-1], [0]),
    "source must hold pages": pages([2], [0]),
    "target must hold pages in": pages([0], [-1]),
    "target must hold pages": pages([0], [2]),
    "target must hold each page once": pages([0, 1], [1, 1]),
    "must have one shape": lambda: tw.copy_pages_(K, V, torch.tensor([1, 0]), torch.tensor([0])),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_are_named(text):
    from test_messages import FORM

    with pytest.raises((TypeError, ValueError), match=text) as error:
        WRONG[text]()
    assert FORM.fullmatch(str(error.value)), str(error.value)


def test_gradients_are_refused():
    with pytest.raises(tw.Unsupported, match="no gradients"):
        tw.append_(K, V, NEW.clone().requires_grad_(), NEW, layout=LAYOUT)
