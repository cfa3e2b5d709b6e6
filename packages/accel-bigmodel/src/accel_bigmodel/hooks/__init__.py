"""What runs around a module's forward: placing inputs, bringing weights in, sending them away again."""
