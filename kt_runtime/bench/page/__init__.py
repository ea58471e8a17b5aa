"""A JSON file per measurement in docs/measurements; the page and the README's tables are generated from these files."""
