"""Every setting of a run: where it can be said, what it means, and who said it."""
