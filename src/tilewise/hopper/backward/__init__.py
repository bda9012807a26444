"""The backward of 16-bit types: device code."""
