"""Settings that `kt-runtime serve` passes to the resident process: one JSON object in one environment variable.

SGLang starts its processes itself; only the environment reaches all of them.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from kt_runtime.errors import InvalidValueError

ENVIRONMENT_VARIABLE = "KT_RUNTIME_SETTINGS"


class ResidentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wire_address`: ZMQ endpoint of the training protocol. `names_address`: ZMQ endpoint of the names channel.

    `adapter_directory`: stores published versions, for rollback and restarts; `stores_at_once`: before the first
    requests for a version, since other servers wait for its files. `max_adapters`, `max_adapter_disk_bytes`: how many
    names may have an adapter, and what the directory may hold; None: any (`publishing.holdings`). `expert_isa`,
    `expert_threads`: None lets the expert store choose. `expert_format`: format to which the experts are quantized at
    load time, None: the checkpoint's own. `train_share`, `tpot_target_ms`, `ttft_target_ms`: as of
    `wire.settings.Settings`, until they are changed. `microbatch_tokens`: padded tokens that training sends through a
    layer at once; a smaller value shortens serving's pauses. `lora_memory_bytes`: size of the adapters in the slots of
    host memory, None: as many adapters as there are slots. `max_sessions`, `session_memory_bytes` (None: no limit):
    limits of training sessions (`session_limits`).

    The prefix cache's disk tier: off if `cache_directory` is None or `cache_disk_bytes` is 0, each rank's quota.
    `cache_page_tokens`: tokens of a page in all tiers. `cache_read_only`: nothing is written to the directory.

    `gpu_expert_bytes`: size of the hot experts' slots and buffers on the device, 0: none. `gpu_expert_format`: how
    slots hold them: as the store does ("published"), in the model's dtype ("model"), or the former where experts are
    quantized ("auto"). `pinned_experts`: layer -> experts that always have a slot there. `ring_chunk_experts`: experts
    of a chunk of the ring that streams experts to the device, as the memory plan has room for; 0: no ring.

    `stream_experts`: calls of at least so many tokens compute their experts on the device, to which these stream.
    "auto": a number that is measured; without a device, or memory for it, none. "off": none.

    `route_bytes`: memory for the routes of served tokens, 0: they are not kept.

    `host_address`: of this host among several, empty with one.

    `step`: on a CPU the native step computes the decoder stack where it can; False: SGLang's modules do.
    """

    model: str
    model_directory: str
    wire_address: str
    names_address: str
    adapter_directory: str
    stores_at_once: bool = False
    max_adapters: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_adapter_disk_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    expert_isa: str | None = None
    expert_threads: int | None = None
    expert_format: str | None = None
    train_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    tpot_target_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    ttft_target_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    kept_versions: Annotated[int, msgspec.Meta(ge=1)] = 8
    microbatch_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    lora_memory_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_sessions: Annotated[int, msgspec.Meta(ge=1)] = 64
    session_memory_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cache_directory: str | None = None
    cache_disk_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    cache_page_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1
    cache_read_only: bool = False
    route_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    host_address: str = ""
    step: bool = True
    gpu_expert_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    gpu_expert_format: Literal["auto", "published", "model"] = "auto"
    pinned_experts: dict[int, tuple[int, ...]] = {}
    ring_chunk_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    stream_experts: Literal["auto", "off"] | Annotated[int, msgspec.Meta(ge=1)] = "auto"

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> ResidentSettings | None:
        """None outside of a server that `kt-runtime serve` started. Raises InvalidValueError for a bad value."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidValueError(f"{ENVIRONMENT_VARIABLE}: {error}; `kt-runtime serve` sets it") from None
