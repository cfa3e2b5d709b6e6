"""Which device holds which part of a model."""
