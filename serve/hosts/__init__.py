"""Several hosts: machines whose ranks compute one model. Each runs `kt-runtime serve` with its `--node-rank`.

Host 0 has the HTTP server. Each other host has a TCP connection to host 0, in addition to those of the ranks. Before
anything is loaded, the hosts compare over it what must be equal (`facts`). Afterwards they tell each other that they
live and why they end.
"""
