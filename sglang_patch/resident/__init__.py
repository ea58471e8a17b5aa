"""The resident in SGLang's scheduler process: its host, its turns, and what it reports."""
