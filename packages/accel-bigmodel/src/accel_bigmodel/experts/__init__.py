"""Experts of a mixture that come one by one through a cache; `door` is all that the rest of the package calls."""
