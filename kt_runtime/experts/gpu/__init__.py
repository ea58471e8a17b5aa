"""Calls on routed experts with tensors on a device: which part the device computes, and how weights and rows get
there."""
