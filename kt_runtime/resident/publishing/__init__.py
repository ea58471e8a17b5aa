"""An adapter version's way: copied, checked and hashed on a worker, probed, installed, named, written to disk."""
