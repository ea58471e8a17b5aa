"""Measurements: `kt-runtime bench experts`, `train` and `cache`, as shares of the machine's limits and beside named
peers.
"""
