"""Every field of every request body, with its type and range."""
