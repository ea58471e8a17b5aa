"""Grammars compile and match in processes of their own, with bounds; stop patterns in linear time."""
