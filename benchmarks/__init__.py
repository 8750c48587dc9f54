"""Measurements and comparisons against stock PyTorch; run with `python -m benchmarks.<name>`."""
