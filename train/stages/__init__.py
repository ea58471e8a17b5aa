"""The training objectives: batches and losses of one step of SFT or preference training."""
