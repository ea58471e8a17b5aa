"""Rows of a dataset as token ids, through the model's chat template or a named one."""
