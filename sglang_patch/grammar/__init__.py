"""Compiles and matches grammars in separate processes with limits; matches stop patterns in linear time."""
