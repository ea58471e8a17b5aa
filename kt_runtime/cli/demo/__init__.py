"""`kt-runtime demo`: an adapter is trained inside a running server, and the answer changes."""
