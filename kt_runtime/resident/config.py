"""What `kt-runtime serve` decides and the resident process must know: one JSON object in one environment variable.

SGLang starts its processes itself, so the environment is the one thing that reaches all of them.
"""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

from kt_runtime.errors import InvalidValueError

ENVIRONMENT_VARIABLE = "KT_RUNTIME_SETTINGS"


class ResidentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wire_address`: ZMQ endpoint of the training protocol. `names_address`: where the frontend moves names.

    `adapter_directory`: published versions are kept here, for rollback and restarts. `expert_isa`, `expert_threads`:
    None lets the expert store choose. `expert_format`: what the experts are quantized to while they are loaded, None:
    they stay as they are. `training_share`: the largest share of the time that training may take while
    requests are being served, in (0, 1]; with nothing to serve, training has all of it. `microbatch_tokens`: padded
    tokens that training sends through a layer at once; fewer make shorter pauses for serving. `max_sessions`,
    `session_memory_bytes` (None: not limited): of training sessions, `session_limits` says how it is counted.

    The prefix cache's disk tier: `cache_directory` None or `cache_disk_bytes` 0, there is none. `cache_page_tokens`:
    of a page in all tiers. `cache_read_only`: nothing is written to the directory.
    """

    model: str
    model_directory: str
    wire_address: str
    names_address: str
    adapter_directory: str
    expert_isa: str | None = None
    expert_threads: int | None = None
    expert_format: str | None = None
    training_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    kept_versions: Annotated[int, msgspec.Meta(ge=1)] = 8
    microbatch_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    max_sessions: Annotated[int, msgspec.Meta(ge=1)] = 64
    session_memory_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cache_directory: str | None = None
    cache_disk_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    cache_page_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1
    cache_read_only: bool = False

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
