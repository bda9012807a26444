"""The benchmark's engine: cases, peers, measurement, results, pictures. `python -m studies bench` drives it."""
