"""`kt-runtime bench experts`: how near the expert engine comes to the machine's limits, and to its peers."""
