"""The commands that this package adds to `accel`; declaring them imports no torch."""
