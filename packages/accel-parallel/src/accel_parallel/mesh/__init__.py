"""Copies of a model whose ranks share one replica: the axes of a mesh without sharding of parameters."""
