"""Checkpoints and presets: finding, checking and describing them, and making random ones."""
