"""Measurements: `kt-runtime bench experts`, `train` and `cache`, compared with the machine's limits and named peers.

`page` generates docs/measurements.md from the JSON files of all measurements.
"""
