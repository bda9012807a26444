"""New keys and values into a cache."""
