"""Experiment tracking that never stops a run, never slows it and never loses a number."""
