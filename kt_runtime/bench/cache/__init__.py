"""The prefix cache: time to first token from each tier, and the disk tier against plain files."""
