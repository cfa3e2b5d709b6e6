"""Loaders of data: each rank its part, every sample once, from any position."""
