"""Attention: what a user calls, its operators and gradients, and the reference that specifies it."""
