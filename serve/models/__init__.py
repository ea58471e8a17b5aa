"""Checkpoints and presets: found, described, made."""
