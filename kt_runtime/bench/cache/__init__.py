"""The prefix cache: time to first token from each tier, and the disk tier compared with plain files."""
