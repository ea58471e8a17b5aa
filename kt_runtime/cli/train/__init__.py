"""`kt-runtime train` and `predict`: a recipe is checked against model, data and server, then run."""
