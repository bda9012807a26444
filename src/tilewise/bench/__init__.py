"""The benchmark's engine: cases, peers, measurement, results, pictures. `python -m tilewise bench` drives it."""
