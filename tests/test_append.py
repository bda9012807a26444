"""append_ and copy_pages_: exact, in their place and nowhere else, on the CPU and in Triton."""

import pytest
import torch

import tilewise as tw
from tilewise import append

PATHS = ("torch", "kernel")


@pytest.fixture(params=PATHS)
def device(request, monkeypatch):
    """Run by torch, or by the kernel: on a GPU, or in the interpreter."""
    if request.param == "kernel":
        if torch.cuda.is_available():
            return "cuda"
        launch = append._launcher()
        monkeypatch.setattr(append, "_in_torch", lambda k, v, k_new, v_new, q, y, call: launch(
            k, v, k_new, v_new, q, None if q is None else y, call))  # fmt: skip
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


@pytest.mark.parametrize("turn", ["no", "halves", "neighbours", "part"])
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
def test_exactly_its_rows_are_written(device, queries, lengths, table, index, starts, packed, turn):
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
    R = {"no": 0, "part": 12}.get(turn, 32)
    angles = torch.randn(200, R // 2, device=device)
    given, turned = {}, k_new
    if R:
        given = {"cos": angles.cos(), "sin": angles.sin(), "interleaved": turn == "neighbours", "q": q}
        offsets = torch.tensor([n - m for n, m in zip(lengths, queries, strict=True)], device=device)
        options = {"interleaved": turn == "neighbours", "offsets": offsets + 10, "cu_seqlens": cu}
        rows = slice(0, sum(queries)) if packed else slice(None)
        longer = torch.cat([angles[:1].expand(10, -1), angles])  # rows before 0 read the first angle
        want_q, turned = tw.rotary_qk(q[rows], k_new[rows], longer.cos(), longer.sin(), **options)
    want = [expected(*args, lengths, queries, pages, index, starts, packed) for args in ((k, turned), (v, v_new))]
    got = tw.append_(k, v, k_new, v_new, layout=layout, **given)
    if R:
        torch.testing.assert_close(got[rows], want_q, atol=1e-6, rtol=0)
    else:
        assert got is None
    torch.testing.assert_close(k, want[0], atol=1e-6 if R else 0, rtol=0)
    assert torch.equal(v, want[1])


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
    want, turned = tw.rotary_qk(q, k_new, angles.cos(), angles.sin(), offsets=offsets)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(k[1, 27:30], turned[1], atol=1e-3, rtol=1e-2)
    assert torch.equal(v[0, :3], v_new[0])


@pytest.mark.parametrize("shape", [(), (2,), (3, 2)], ids=str)
def test_8_bits_are_rounded_to_nearest_even_and_saturated(device, shape):
    if device == "cpu" and append._in_torch.__name__ == "<lambda>":
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
        turned = tw.append_(k, v, k_new, v_new, layout=own, cos=angles.cos(), sin=angles.sin(), q=q)
        return tw.attention(turned, k, v.repeat(1, 1, 1, 2), mask=tw.Causal(), layout=own)

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


K, V, NEW, LAYOUT = (
    torch.zeros(2, 8, 2, 4),
    torch.zeros(2, 8, 2, 4),
    torch.zeros(2, 1, 2, 4),
    tw.Cached(torch.tensor([1, 2])),
)
WRONG = {
    "layout must be a Cached": lambda: tw.append_(K, V, NEW, NEW, layout=None),
    "k_new must be a tensor": lambda: tw.append_(K, V, None, NEW, layout=LAYOUT),
    "k_new must have shape": lambda: tw.append_(K, V, NEW[0], NEW, layout=LAYOUT),
    "v_new must have k_new's rows": lambda: tw.append_(K, V, NEW, NEW.repeat(1, 2, 1, 1), layout=LAYOUT),
    "k_new must have the cache's heads": lambda: tw.append_(K, V, NEW[..., :2], NEW, layout=LAYOUT),
    "v_new must be of the cache's type": lambda: tw.append_(K, V, NEW, NEW.half(), layout=LAYOUT),
    "k must have adjacent entries": lambda: tw.append_(torch.zeros(2, 8, 4, 2).mT, V, NEW, NEW, layout=LAYOUT),
    "cos must be given with sin": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, q=NEW),
    "cos and sin must have shape": lambda: tw.append_(K, V, NEW, NEW, layout=LAYOUT, cos=K[0, 0], sin=V[0]),
    "source must be an int32": lambda: tw.copy_pages_(K, V, [1], torch.tensor([0])),
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
