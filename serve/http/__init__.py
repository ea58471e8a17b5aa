"""kt-runtime's own HTTP routes, and the access checks of every request: keys, origins, the route table."""
