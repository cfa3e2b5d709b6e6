"""The number formats that a run computes in."""
