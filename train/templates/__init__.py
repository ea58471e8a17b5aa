"""LLaMA-Factory's named templates, and their formats of tools and calls."""
