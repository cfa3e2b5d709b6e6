"""Reading checkpoints and putting their tensors straight where they belong."""
