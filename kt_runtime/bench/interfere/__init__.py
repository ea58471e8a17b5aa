"""`kt-runtime bench interfere`: how training and serving on one server disturb each other, under an open-loop load."""
