"""The checks of a request before SGLang parses it: size, syntax, fields, names, volume."""
