"""The sizes of the prefix cache's tiers, as `kt_runtime.serve.memory.cache` works them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kt_runtime.cache.disk_tier import DiskTierSettings

# What the disk tier's index takes in memory per record; measured with a million.
INDEX_BYTES = 215


@dataclass(frozen=True)
class CachePlan:
    """`page_tokens`: tokens of a page in every tier. `token_bytes`: KV of one token, all layers.

    `device_tokens`, `host_tokens` (0: no such tier): whole pages. `host_tokens` is what SGLang's host pool holds in
    all. `disk_bytes`: the quota, 0: no disk tier, else `directory` is where it is. `read_only`: nothing is written
    there.
    """

    page_tokens: int
    token_bytes: int
    device_tokens: int
    host_tokens: int
    disk_bytes: int
    directory: Path | None
    read_only: bool = False

    @property
    def page_bytes(self) -> int:
        """KV of one page: the payload of a record on disk."""
        return self.page_tokens * self.token_bytes

    @property
    def host_ratio(self) -> float:
        """For SGLang's --hicache-ratio, 0.0 without a host tier. It multiplies, rounds down to whole pages and adds one
        page; half a page less than what is wanted ends up at exactly `host_tokens`."""
        return max(0.0, self.host_tokens - 0.5 * self.page_tokens) / self.device_tokens

    @property
    def host_bytes(self) -> int:
        return self.host_tokens * self.token_bytes

    @property
    def disk_memory_bytes(self) -> int:
        """What the disk tier takes in memory: buffers for reading and writing, and the index."""
        if self.disk_bytes == 0:
            return 0
        buffers = DiskTierSettings.read_memory_bytes + max(DiskTierSettings.write_memory_bytes, self.page_bytes)
        return buffers + self.disk_bytes // self.page_bytes * INDEX_BYTES
