"""Tensor parallel: ranks that compute one product together, each on its part of the weights.

Its modules load torch's `DTensor`; a strategy imports them when a mesh has the axis.
"""
