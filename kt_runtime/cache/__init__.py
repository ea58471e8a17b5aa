"""The prefix cache's disk tier: pages of KV as checksummed records in a directory, with a byte quota and LRU eviction.

The package handles keys (text), bytes and files. Models, tokens, tensors and SGLang are outside of it. Entry points:

- `DiskTier` is the server's interface: never raises while serving, reads ahead, writes behind.
- `PageStore` is the directory itself, synchronous; `inspection` serves the command line.
- All file access goes through `disk`.
"""
