"""Pipelines: each rank holds some of a model's repeated blocks, and batches pass through in parts."""
