"""Bodies and queries of SGLang's routes that do not use the model. kt-runtime's are in `serve/http/routes.py`.

Source: `sglang.srt.managers.io_struct` of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import Body, Count, Label, LongName, Name, Seconds


class LoadAdapter(Body, kw_only=True):
    lora_name: Name
    lora_path: LongName
    pinned: bool = False


class UnloadAdapter(Body, kw_only=True):
    lora_name: Name


class AbortRequest(Body, kw_only=True):
    rid: Name | None = None
    abort_all: bool = False
    abort_message: LongName | None = None


class PauseGeneration(Body, kw_only=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(Body, kw_only=True):
    torch_empty_cache: bool = True


class OpenSession(Body, kw_only=True):
    capacity_of_str_len: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    session_id: Name | None = None
    streaming: bool | None = None
    timeout: Seconds | None = None


class CloseSession(Body, kw_only=True):
    session_id: Name


class FlushQuery(Body, kw_only=True):
    timeout: Seconds = 0.0


class LoadsQuery(Body, kw_only=True):
    dp_rank: Count | None = None
    include: Name | None = None
    format: Label | None = None
