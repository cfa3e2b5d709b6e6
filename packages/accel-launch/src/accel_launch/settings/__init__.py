"""Every setting of a run: where it can be given, what it means, and where its value comes from."""
