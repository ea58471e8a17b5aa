"""The tables of the model families, one file each, and what several of them share."""
