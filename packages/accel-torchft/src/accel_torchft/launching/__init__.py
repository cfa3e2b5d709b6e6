"""What the launcher does for a run with replicas; it alone imports this folder."""
