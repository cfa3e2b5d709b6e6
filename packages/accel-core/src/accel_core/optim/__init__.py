"""Optimizers and schedules that know about accumulation windows."""
