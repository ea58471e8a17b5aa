"""Bodies of SGLang's own generating routes: /generate and /vertex_generate.

Source: `GenerateReqInput` and `VertexGenerateReqInput` in `sglang.srt.managers.io_struct` of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    MAX_PROMPTS,
    Body,
    Count,
    LogprobTokenIds,
    Name,
    Names,
    NamesOrNull,
    OneOrMorePromptsOfIds,
    Position,
    Priority,
    Prompt,
    Prompts,
    RequestId,
    RequestIds,
    TokenIds,
    TopLogprobs,
)
from kt_runtime.serve.requests.bodies.sampling import INTERNAL, NO_PROCESSORS, NO_WATERMARK, SamplingParams

NO_MEDIA = "the models that kt-runtime serves read text only: a vision tower is left out"
NO_EMBEDDINGS = "prompts are text or token ids; embeddings in a request are not offered"
NO_CHOICE_OF_RANK = "a request can not choose a rank or another server: all ranks of this one compute each request"
NO_MODEL = "an adapter is named by lora_path here, by model in /v1"  # sglang-router adds "model": null
NOT_OFFERED = "kt-runtime does not offer it"

MEDIA = (
    *("image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes", "use_audio_in_video"),
    *("video_config", "modalities", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"),
    *("video_max_dynamic_patch", "images_config", "mm_processor_kwargs"),
)
OTHER_RANKS = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
    *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "routing_key", "http_worker_ipc"),
    *("need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "kv_hints"),
)


class SessionParams(Body, kw_only=True):
    """The request of a session (`/open_session`) that the prompt continues."""

    id: Name
    rid: Name | None = None
    offset: Count | None = None
    drop_previous_output: bool | None = None

    left_out: ClassVar[dict[str, str]] = {"replace": "SGLang 0.5.23's scheduler ends when a turn is replaced"}


class LogprobFields(Body, kw_only=True):
    """The common fields of /generate and /vertex_generate. In a batch a list has one entry per prompt."""

    sampling_params: (
        SamplingParams | Annotated[list[SamplingParams], Meta(min_length=1, max_length=MAX_PROMPTS)] | None
    ) = None
    return_logprob: bool | Annotated[list[bool], Meta(max_length=MAX_PROMPTS)] | None = None
    logprob_start_len: Position | Annotated[list[Position], Meta(max_length=MAX_PROMPTS)] | None = None
    top_logprobs_num: TopLogprobs | Annotated[list[TopLogprobs], Meta(max_length=MAX_PROMPTS)] | None = None
    token_ids_logprob: LogprobTokenIds | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    rid: RequestId | RequestIds | None = None
    lora_path: Name | NamesOrNull | None = None
    lora_id: Name | NamesOrNull | None = None  # ignored: `FrontendManager.generate_request` sets it
    extra_key: Name | Names | None = None
    cache_salt: Name | Names | None = None
    session_id: Name | None = None
    session_params: SessionParams | None = None
    conversation_id: Name | None = None
    priority: Priority | None = None
    require_reasoning: bool = False
    no_logs: bool = False
    log_metrics: bool = True

    left_out: ClassVar[dict[str, str]] = {
        **dict.fromkeys(MEDIA, NO_MEDIA),
        **dict.fromkeys(OTHER_RANKS, NO_CHOICE_OF_RANK),
        "model": NO_MODEL,
        "input_embeds": NO_EMBEDDINGS,
        "positional_embed_overrides": NO_EMBEDDINGS,
        "custom_logit_processor": NO_PROCESSORS,
        "watermark": NO_WATERMARK,
        "custom_labels": "metrics have the labels that the server gives them",
        "external_trace_header": "tracing is not set up",
        "received_time": INTERNAL,
        "background": INTERNAL,
        "return_bytes": INTERNAL,
        "return_hidden_states": NOT_OFFERED,
        "return_routed_experts": "routed experts are run by kt-runtime's expert store, which does not record them",
        "routed_experts_start_len": "routed experts are run by kt-runtime's expert store, which does not record them",
        **dict.fromkeys(
            (
                *("return_sampling_mask", "sampling_logprobs_mode", "return_flat_raw_top_logprobs"),
                *("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_indexer_topk"),
                *("return_entropy", "max_thinking_tokens", "multi_item_delimiter_indices", "token_indices_to_pool"),
            ),
            NOT_OFFERED,
        ),
    }


class Generate(LogprobFields, kw_only=True):
    text: Prompt | Prompts | None = None
    input_ids: OneOrMorePromptsOfIds | None = None


class VertexInstance(Body, kw_only=True):
    text: Prompt | None = None
    input_ids: TokenIds | None = None


class VertexGenerate(Body, kw_only=True):
    """`parameters` are the other fields of /generate."""

    instances: Annotated[list[VertexInstance], Meta(max_length=MAX_PROMPTS)]
    parameters: LogprobFields | None = None
