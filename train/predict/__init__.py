"""Batch answers with their figures."""
