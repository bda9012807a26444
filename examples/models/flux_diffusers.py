"""Train a small Flux transformer of diffusers by flow matching; its calls of PyTorch's SDPA run on tilewise.

python examples/models/flux_diffusers.py     needs `pip install 'tilewise[integrations]'`
"""

import diffusers
import torch

import tilewise as tw
from tilewise.compat import sdpa

STEPS = 40
BATCH, SIDE, WORDS, CHANNELS = 4, 8, 6, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def positions() -> dict[str, torch.Tensor]:
    """Return the positions of words, all 0, and of patches: (0, row, column)."""
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    patches = torch.stack([torch.zeros_like(row), row, column], -1).flatten(0, 1).float()
    return {"img_ids": patches.to(DEVICE), "txt_ids": torch.zeros(WORDS, 3, device=DEVICE)}


def main() -> tuple[float, float, tw.Calls]:
    """Train, and return the first and last loss and the calls of attention."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    words, pooled = torch.randn(BATCH, WORDS, 32, device=DEVICE), torch.randn(BATCH, 32, device=DEVICE)
    image = torch.sin(torch.arange(SIDE**2, device=DEVICE) / 5.0)[None, :, None].expand(BATCH, -1, CHANNELS)
    losses = []
    # always: without it, calls as short as these stay on PyTorch's kernels, which are faster for them
    with sdpa.use(devices=(DEVICE,), always=True), tw.count_calls() as calls:
        for _ in range(STEPS):
            noise, t = torch.randn_like(image), torch.rand(BATCH, device=DEVICE)
            mixed = torch.lerp(image, noise, t[:, None, None])
            asked = {"encoder_hidden_states": words, "pooled_projections": pooled, "timestep": t, **positions()}
            velocity = model(mixed, **asked, return_dict=False)[0]
            loss = (velocity - (noise - image)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5, calls


if __name__ == "__main__":
    first, last, calls = main()
    print(f"loss {first:.2f} to {last:.2f}; tilewise {calls}")
