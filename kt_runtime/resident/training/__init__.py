"""Training sessions: calls cut into slices, losses, optimizer, checkpoints, limits."""
