"""What the GPU back ends share on the host: kernel arguments, launches, tables of tiles, compilation.

Nothing here runs on a device; the functions that do are in `tile/`.
"""
