"""`kt-runtime bench swap`: how long publishing and loading adapters take, and how long they stop streams."""
