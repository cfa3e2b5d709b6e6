"""The rows that `benchmarks/gpu.py` measures, by subject."""
