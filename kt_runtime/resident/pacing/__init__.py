"""How long a turn of training may take: the targets for serving, what they leave, and what slices cost."""
