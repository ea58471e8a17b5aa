"""Routed experts of tensors on a device: which of their work the device does, and how weights and rows get there."""
