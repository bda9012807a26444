"""Compute the forward of 16-bit types: device code."""
