"""Checkpoints that survive a kill at any instant and resume exactly."""
