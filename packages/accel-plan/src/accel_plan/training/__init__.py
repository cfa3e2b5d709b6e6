"""How much memory a training step takes on each rank, found without weights and without devices."""
