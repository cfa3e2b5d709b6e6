"""What the launcher does for a run with DeepSpeed; it alone imports this folder."""
