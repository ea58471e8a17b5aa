"""Matrices of linear layers that stay quantized in memory."""
