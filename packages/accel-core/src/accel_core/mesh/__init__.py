"""Axes along which processes share the work."""
