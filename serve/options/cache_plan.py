"""The sizes of the prefix cache's tiers, as `kt_runtime.serve.memory.cache` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kt_runtime.cache.disk_tier import DiskTierSettings

# Memory of the disk tier's index per record, measured with a million records.
INDEX_BYTES = 215


@dataclass(frozen=True)
class CachePlan:
    """`page_tokens`: tokens of a page in every tier. `token_bytes`: KV of one token, all layers.

    `device_tokens`, `host_tokens` (0: no host tier): the tiers' sizes, whole pages. `host_tokens` includes the copies
    of device pages. `disk_bytes`: the quota of the disk tier in `directory`, 0: no disk tier. `read_only`: the disk
    tier is never written. `state_slots`: of the device's pool of linear attention's states, of `slot_bytes` each.

    `ranks`: of this host, each with its part of the disk tier. `page_parts`: ranks over which the KV of a page is
    split; 1 where each rank has all of it.
    """

    page_tokens: int
    token_bytes: int
    device_tokens: int
    host_tokens: int
    disk_bytes: int
    directory: Path | None
    read_only: bool = False
    state_slots: int = 0
    slot_bytes: int = 0
    ranks: int = 1
    page_parts: int = 1

    @property
    def page_bytes(self) -> int:
        """KV of one page."""
        return self.page_tokens * self.token_bytes

    @property
    def record_bytes(self) -> int:
        """KV of one page on one rank: the payload of a record on disk."""
        return self.page_bytes // self.page_parts

    @property
    def rank_disk_bytes(self) -> int:
        """The quota of each rank of this host."""
        return self.disk_bytes // self.ranks

    @property
    def host_ratio(self) -> float:
        """The value of SGLang's --hicache-ratio, 0.0 without a host tier. SGLang multiplies the device tokens by it,
        rounds down to whole pages and adds one page: half a page below the target gives exactly `host_tokens`."""
        return max(0.0, self.host_tokens - 0.5 * self.page_tokens) / self.device_tokens

    @property
    def host_slots(self) -> int:
        """Slots of the host tier's pool of states: SGLang multiplies the device's by the same ratio, and adds one."""
        return int(self.state_slots * self.host_ratio) + 1 if self.host_tokens and self.state_slots else 0

    @property
    def host_bytes(self) -> int:
        return self.host_tokens * self.token_bytes + self.host_slots * self.slot_bytes

    @property
    def disk_memory_bytes(self) -> int:
        """Memory of the disk tier: read and write buffers, and the index, of each rank of this host."""
        if self.disk_bytes == 0:
            return 0
        buffers = DiskTierSettings.read_memory_bytes + max(DiskTierSettings.write_memory_bytes, self.record_bytes)
        return self.ranks * (buffers + self.rank_disk_bytes // self.record_bytes * INDEX_BYTES)
