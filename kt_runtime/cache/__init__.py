"""The prefix cache's disk tier belongs here: page records, quota, eviction. It comes with its own issue.

Until then SGLang's prefix cache is what there is: in memory, keyed by the id of each published adapter version, so that
KV of one version is never another's.
"""
