"""Reads checkpoints and puts their tensors straight into place."""
