"""Batch generation of answers, and their metrics."""
