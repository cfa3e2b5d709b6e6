"""Weights that live on the CPU or on disk: stores, file maps, and the schedule that moves them in time."""
