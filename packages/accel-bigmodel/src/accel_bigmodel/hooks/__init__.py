"""What runs around a module's forward: moving inputs, loading weights, offloading them again."""
