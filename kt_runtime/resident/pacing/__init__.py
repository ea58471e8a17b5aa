"""How long a turn of training may take: targets for serving, the slack that requests have, and the cost of slices."""
