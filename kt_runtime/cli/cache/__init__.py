"""`kt-runtime cache`: the prefix cache's disk tier."""
