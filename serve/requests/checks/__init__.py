"""What is checked of a request before SGLang sees it: size, syntax, fields, names, volume."""
