"""The portable back end, in Triton."""
