"""Train a vision transformer of timm on two kinds of stripes; its calls of PyTorch's SDPA run on tilewise.

python examples/models/vit_timm.py     needs `pip install 'tilewise[integrations]'`
"""

import timm
import torch
from torch.nn.functional import cross_entropy

import tilewise as tw
from tilewise.compat import sdpa

STEPS = 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stripes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (count, 3, 64, 64) of noisy stripes that lie (0) or stand (1), and which they do."""
    standing = torch.randint(2, (count,))
    wave = torch.sin(torch.arange(64) * torch.empty(count, 1).uniform_(0.3, 0.9))[:, :, None].expand(-1, -1, 64)
    images = torch.where(standing[:, None, None] == 1, wave.mT, wave)[:, None].expand(-1, 3, -1, -1)
    return (images + 0.3 * torch.randn(count, 3, 64, 64)).to(DEVICE), standing.to(DEVICE)


def main() -> tuple[float, float, tw.Calls]:
    """Train, and return the first and last loss and the calls of attention."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=2, num_classes=2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    # always: without it, calls as short as these stay on PyTorch's kernels, which are faster for them
    with sdpa.use(devices=(DEVICE,), always=True), tw.count_calls() as calls:
        for _ in range(STEPS):
            images, standing = stripes(16)
            loss = cross_entropy(model(images), standing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[0], sum(losses[-5:]) / 5, calls


if __name__ == "__main__":
    first, last, calls = main()
    print(f"loss {first:.2f} to {last:.2f}; tilewise {calls}")
