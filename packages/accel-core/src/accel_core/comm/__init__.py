"""Tensors and objects across processes."""
