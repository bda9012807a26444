"""Benchmark: cases, peers, measurement and results. `python -m tilewise bench` runs it."""
