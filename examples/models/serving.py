"""Serve a tiny Llama with continuous batching: keys in pages, chunked prefill, shared prefixes, preemption.

python examples/models/serving.py     needs `pip install 'tilewise[integrations]'`
"""

import random
from dataclasses import dataclass, field

import torch
import transformers

import tilewise as tw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 8, 22
"""Keys of a page, and pages of the pool: too few for all requests at once."""
CHUNK, BUDGET = 12, 32
"""New tokens of a request and of a batch in one step, at most."""


@dataclass(eq=False)
class Request:
    """A prompt, how many tokens it wants, and what has been done of it."""

    prompt: list[int]
    wanted: int
    arrives: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def finished(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.wanted


class Pool:
    """The pages of all layers: which are free, who shares one, and which hold a known beginning of a prompt."""

    def __init__(self, config: transformers.LlamaConfig, size: int) -> None:
        shape = (PAGES, PAGE, config.num_key_value_heads, size)
        self.layers = [
            tuple(torch.full(shape, torch.nan, device=DEVICE) for _ in "kv") for _ in range(config.num_hidden_layers)
        ]
        self.free, self.users = list(range(PAGES)), [0] * PAGES
        self.known: dict[tuple[int, ...], int] = {}
        self.counts = {"shared": 0, "freed": 0, "preempted": 0}

    def share(self, request: Request) -> None:
        """Give a request the pages that hold the beginning of its tokens already; one token is left to compute."""
        while request.cached + PAGE < len(request.tokens):
            page = self.known.get(tuple(request.tokens[: request.cached + PAGE]))
            if page is None:
                return
            self.users[page] += 1
            self.counts["shared"] += 1
            request.pages.append(page)
            request.cached += PAGE

    def reserve(self, request: Request, length: int) -> bool:
        """Give a request pages for so many keys, or tell that there are too few."""
        missing = -(-length // PAGE) - len(request.pages)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            page = self.free.pop()
            self.users[page] = 1
            request.pages.append(page)
        return True

    def remember(self, request: Request) -> None:
        """Let later requests share the pages of a request that are full."""
        for n in range(request.cached // PAGE):
            self.known.setdefault(tuple(request.tokens[: (n + 1) * PAGE]), request.pages[n])

    def release(self, request: Request) -> None:
        """Take a request's pages back, and poison those that nobody else uses: a key read from one would be NaN."""
        for page in request.pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.known = {prefix: other for prefix, other in self.known.items() if other != page}
                for k, v in self.layers:
                    k[page], v[page] = torch.nan, torch.nan
                self.free.append(page)
                self.counts["freed"] += 1
        request.pages, request.cached = [], 0


def forward(model: transformers.LlamaForCausalLM, pool: Pool, ids: torch.Tensor, layout: tw.Cached) -> torch.Tensor:
    """Return the logits of the last new token of each sequence."""
    x = model.model.embed_tokens(ids)
    places = torch.arange(PAGE * PAGES, device=DEVICE)[None]
    cos, sin = (t[0, :, : t.shape[-1] // 2] for t in model.model.rotary_emb(x, places))
    for layer, (k, v) in zip(model.model.layers, pool.layers, strict=True):
        own, y = layer.self_attn, layer.input_layernorm(x)
        q, k_new, v_new = (p(y).unflatten(-1, (-1, k.shape[-1])) for p in (own.q_proj, own.k_proj, own.v_proj))
        q = tw.append_(k, v, k_new, v_new, layout=layout, cos=cos, sin=sin, q=q)
        o = tw.attention(q, k, v, mask=tw.Causal(), layout=layout)
        x = x + own.o_proj(o.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x[layout.cu_q[1:].long() - 1]))


def plan(running: list[Request], waiting: list[Request], pool: Pool) -> list[tuple[Request, int]]:
    """Choose the requests of a step and their new tokens; the latest give up their pages where there are too few."""
    batch: list[tuple[Request, int]] = []
    left = BUDGET
    for request in list(running):
        count = min(len(request.tokens) - request.cached, CHUNK, left)
        while request in running and count and not pool.reserve(request, request.cached + count):
            last = running.pop()
            pool.release(last)
            pool.counts["preempted"] += 1
            waiting.insert(0, last)
            batch = [(one, new) for one, new in batch if one is not last]
        if request in running and count:
            batch.append((request, count))
            left -= count
    return batch


def step(model: transformers.LlamaForCausalLM, pool: Pool, batch: list[tuple[Request, int]]) -> None:
    """Compute the new tokens of a batch, decodes and chunks of prompts alike, and append what they predict."""
    ids = [token for one, count in batch for token in one.tokens[one.cached : one.cached + count]]
    width = max(len(one.pages) for one, _ in batch)
    table = [one.pages + [PAGES] * (width - len(one.pages)) for one, _ in batch]  # a page that is not there, not read
    lengths, ends = [one.cached + count for one, count in batch], [0]
    for _, count in batch:
        ends.append(ends[-1] + count)
    numbers = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (lengths, table, ends)]
    layout = tw.Cached(*numbers[:2], cu_q=numbers[2], max_q=max(count for _, count in batch))
    best = forward(model, pool, torch.tensor(ids, device=DEVICE), layout).argmax(-1).tolist()
    for (one, count), token in zip(batch, best, strict=True):
        one.cached += count
        pool.remember(one)
        if one.cached == len(one.tokens):
            one.tokens.append(token)


@torch.no_grad()
def serve(model: transformers.LlamaForCausalLM, requests: list[Request]) -> dict[str, int]:
    """Run all requests to their ends, and return what happened to pages."""
    pool = Pool(model.config, model.config.hidden_size // model.config.num_attention_heads)
    coming, waiting, running = sorted(requests, key=lambda one: one.arrives), [], []
    for now in range(10000):
        while coming and coming[0].arrives <= now:
            waiting.append(coming.pop(0))
        while waiting and len(running) < 6:
            request = waiting.pop(0)
            request.tokens = request.tokens or list(request.prompt)
            pool.share(request)
            running.append(request)
        if batch := plan(running, waiting, pool):
            step(model, pool, batch)
        for request in [one for one in running if one.finished]:
            pool.release(request)
            running.remove(request)
        if not (coming or waiting or running):
            break
    return pool.counts


def main() -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    """Return the tokens of every request, those of the model's own generate, and what happened to pages."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    draw = random.Random(0)
    system = [draw.randrange(1, 96) for _ in range(19)]  # what several prompts begin with
    requests = [
        Request((system if n % 2 else []) + [draw.randrange(1, 96) for _ in range(draw.randrange(3, 40))],
                draw.randrange(4, 30), draw.randrange(0, 25)) for n in range(12)
    ]  # fmt: skip
    counts = serve(model, requests)
    expected = []
    for one in requests:
        ids = torch.tensor([one.prompt], device=DEVICE)
        real = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=real, max_new_tokens=one.wanted, do_sample=False)
        expected.append(made[0].tolist())
    return [one.tokens for one in requests], expected, counts


if __name__ == "__main__":
    served, expected, counts = main()
    print(
        f"{sum(a == b for a, b in zip(served, expected, strict=True))} of {len(served)} requests as generate; {counts}"
    )
