"""XLA devices: each process computes on its own, and gradients are averaged over all of them."""
