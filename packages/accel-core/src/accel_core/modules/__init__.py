"""What can be asked of a torch module: its tensors, ties, sizes, wrappers and compiled regions."""
