"""The backward above head size 256, whose P and dS lie in memory, a chunk of key tiles at a time."""
