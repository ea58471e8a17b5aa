"""The training loop: steps, evaluation, checkpoints, logs."""
