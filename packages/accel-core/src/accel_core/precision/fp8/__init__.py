"""Eight-bit floating point: one file per library that provides it."""
