"""Errors of 8-bit attention against fp64, on a CPU: tilewise's scheme, FlashAttention-3's, and 16 bits."""
