"""Compute forward and backward for fp32 in products of 16-bit pieces: device code."""
