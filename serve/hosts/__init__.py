"""Several hosts: machines whose ranks compute one model. Each runs `kt-runtime serve` with its `--node-rank`.

Host 0 has the HTTP server. The hosts keep one TCP connection each to host 0, beside those of the ranks: before anything
is loaded they compare what must be equal (`facts`), afterwards they tell each other that they live and why they end.
"""
