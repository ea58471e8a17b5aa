"""The loop: steps, evaluation, checkpoints, logs."""
