"""Routed experts in one tensor for a whole layer."""
