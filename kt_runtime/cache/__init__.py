"""The prefix cache's disk tier: pages of KV as checksummed records in a directory, with a byte quota and LRU eviction.

It knows keys (text), bytes and files; not models, tokens, tensors or SGLang. Who uses what:

- `DiskTier` is what a server holds: never raises while serving, reads ahead, writes behind.
- `PageStore` is the directory itself, synchronous; `inspection` is what the command line looks at it with.
- All file access goes through `filesystem`.
"""
