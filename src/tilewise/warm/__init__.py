"""Kernels compiled ahead of time."""
