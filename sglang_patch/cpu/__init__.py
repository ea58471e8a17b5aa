"""The model's computation on a machine without a GPU, and the routed experts on any machine."""
