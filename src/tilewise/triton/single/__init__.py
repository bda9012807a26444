"""Heads whose score matrix is a single tile."""
