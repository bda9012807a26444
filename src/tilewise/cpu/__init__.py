"""The CPU back end: PyTorch's fused kernel if it supports the call, else the tiled algorithm in torch."""
