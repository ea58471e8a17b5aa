"""`kt-runtime bench experts`: the expert engine compared with the machine's limits and with its peers."""
