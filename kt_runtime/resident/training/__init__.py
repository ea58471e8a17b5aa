"""Sessions: a call cut into slices, losses, optimizer, checkpoints, limits."""
