"""`bench scale`: from a publication on one server to the first token of the last replica of its registry."""
