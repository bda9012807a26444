"""Host code that the GPU back ends share: kernel arguments, launches, tables of tile sizes, compilation.

Nothing here runs on a GPU. Device functions are in `tile/`.
"""
