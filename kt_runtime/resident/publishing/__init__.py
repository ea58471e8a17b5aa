"""The stages of publishing an adapter version: prepare on a worker thread, probe, install, move the name, store."""
