"""Parts of the answer to `GetStatus`."""

from __future__ import annotations

import msgspec

from kt_runtime.wire.settings import Settings


class SessionInfo(msgspec.Struct, kw_only=True):
    """`publishes`: names of the adapters that this session owns. `num_bytes`: the memory that counts against
    --session-memory. `idle_s`, `age_s`: seconds since the session's latest request began, and since the session was
    opened. `num_requests`: the session's requests that run or wait."""

    session: str
    rank: int
    alpha: float
    step: int
    modules: list[str]
    num_parameters: int
    num_bytes: int = 0
    idle_s: float = 0.0
    age_s: float = 0.0
    num_requests: int = 0
    publishes: list[str] = msgspec.field(default_factory=list)


class CacheTier(msgspec.Struct, kw_only=True):
    """One tier of the prefix cache: "device", "host" or "disk". Counters start at the server's start.

    A page is the KV of `page_tokens` tokens, `page_bytes` bytes. `hits`, `misses`: lookups in this tier, in pages; a
    miss in one tier becomes a lookup in the next. `evictions`: pages removed to make room. `bytes_read`,
    `bytes_written`: bytes copied from and to the tier (0 on the device, where pages are used in place). `used_bytes`,
    `capacity_bytes`: size of the tier's current `pages`, and the limit.

    Disk tier only: `corrupt` (records; each counts as a miss too), `counters` (all of
    `kt_runtime.cache.disk.DISK_COUNTERS`), `directory`, `read_only` (pages are never written), `reading_stopped` and
    `writing_stopped` (the reason why the tier is currently not read or written; None: it is).

    Several ranks: pages and bytes are those of rank 0; all have the same pages, each those of its heads. Errors are
    those of all ranks: `corrupt`, the `counters` of faults, `reading_stopped` and `writing_stopped`.
    """

    tier: str
    page_tokens: int
    page_bytes: int
    pages: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int = 0
    bytes_written: int = 0
    corrupt: int = 0
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    directory: str | None = None
    read_only: bool = False
    reading_stopped: str | None = None
    writing_stopped: str | None = None


class RankStatus(msgspec.Struct, kw_only=True):
    """One of several processes that compute the model together. It holds `num_experts` of each layer's routed experts,
    from `first_expert` on: `expert_bytes`, and `dense_bytes` of other weights. `rss_bytes`, `peak_bytes`: memory of its
    process now, and its maximum so far. `host`: the number of its host, `address`: empty with one host.

    `waiting_share`: share of the latest second of work in which it waited for other ranks. `is_slowest`: no rank waited
    less. `sent_bytes`: what it sent to the others since its start, without the engine's own sums. `disk`: its part of
    the prefix cache's disk tier; None without one.
    """

    rank: int
    pid: int
    first_expert: int
    num_experts: int
    dense_bytes: int
    expert_bytes: int
    rss_bytes: int
    peak_bytes: int
    host: int = 0
    address: str = ""
    waiting_share: float = 0.0
    is_slowest: bool = False
    sent_bytes: int = 0
    disk: CacheTier | None = None


class GpuExperts(msgspec.Struct, kw_only=True):
    """Hot experts, which the device computes. `size_bytes`: all slots, of `slot_bytes` each (the largest, if layers
    differ), and the buffers that carry experts there. `resident`: layer -> experts on the device now; `pinned`: how
    many of them never leave.

    `form`: "model", slots hold weights in the model's dtype, or "published", the store's codes and scales, which are
    dequantized into `scratch_bytes` in addition to the size. `formats`, `slots_by_layer`: layer -> the format of its
    slots ("bfloat16", "int4_g32"), and their number.

    Since the start: `hits`, `misses`: pairs (token, expert) of `decode_steps` that the device and the CPU computed;
    `hit_rate`: hits / (hits + misses), 0 before the first. `moves`, `moved_bytes`: copies of experts to the device.
    """

    size_bytes: int
    slot_bytes: int
    slots: int
    pinned: int
    resident: dict[int, list[int]]
    decode_steps: int
    hits: int
    misses: int
    hit_rate: float
    moves: int
    moved_bytes: int
    form: str = "model"
    scratch_bytes: int = 0
    formats: dict[int, str] = msgspec.field(default_factory=dict)
    slots_by_layer: dict[int, int] = msgspec.field(default_factory=dict)


class ExpertStreaming(msgspec.Struct, kw_only=True):
    """Experts that stream to the device. Calls of at least `threshold_tokens` tokens do, except while decoding; None:
    no call does, since the CPU was faster for every number of tokens. `measured`: the threshold was, at the start.

    `chunk_experts`: experts that are copied at a time. `ring_bytes`: size of the ring on the device, and of as much
    pinned memory of the host. Since the start: `forward_tokens`, `backward_tokens`: tokens whose experts streamed,
    forward (prompts, and training) and backward.
    """

    threshold_tokens: int | None
    measured: bool
    chunk_experts: int
    ring_bytes: int
    forward_tokens: int
    backward_tokens: int


class KeptRoutes(msgspec.Struct, kw_only=True):
    """Routes that are kept for routing replay: `tokens` of at most `capacity_tokens` now, in `size_bytes` of memory.

    Since the start: `dropped_tokens`: the oldest tokens, removed to make room for others. `found_tokens`,
    `missed_tokens`: tokens for which training calls asked, with and without kept routes.
    """

    size_bytes: int
    capacity_tokens: int
    tokens: int
    dropped_tokens: int
    found_tokens: int
    missed_tokens: int


class TrainingTurns(msgspec.Struct, kw_only=True):
    """`tpot_p50_ms` to `ttft_p95_ms`: times per output token and to the first token of the latest finished requests,
    measured in the engine from a request's arrival there; 0 without requests. `num_requests`: how many these are.

    `serving_s`, `training_s`: seconds since the start of the engine's work for requests, and of training's slices.
    `share_used`: training's share of the latest half a minute. `budget_ms`: what the present turn may spend on
    training; None: no limit. `slices`: run since the start, `parts`: of them, those that were cut.
    """

    settings: Settings
    tpot_p50_ms: float
    tpot_p95_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    num_requests: int
    share_used: float
    serving_s: float
    training_s: float
    budget_ms: float | None
    slices: int
    parts: int


class UnstoredVersion(msgspec.Struct, kw_only=True):
    """A version that is or was served and is not in the adapter directory. `is_waiting`: the write will be retried."""

    name: str
    version: str
    reason: str
    is_waiting: bool


class UnforgottenName(msgspec.Struct, kw_only=True):
    """An unloaded name that a restart would serve again, because the adapter directory could not be changed."""

    name: str
    reason: str
