"""The portable back end: Triton kernels for every GPU that Triton supports, and its interpreter on the CPU."""
