"""kt-runtime's own HTTP routes, and what every request passes: keys, origins, the route table."""
