"""Experiment tracking that never stops a run and never slows it."""
