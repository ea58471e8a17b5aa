"""`sampling_params` of /generate. Source: `sglang.srt.sampling.sampling_params.SamplingParams` of SGLang 0.5.23."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import (
    LARGEST_INT32,
    Body,
    Count,
    FewTokenIds,
    LogitBias,
    Penalty,
    RepetitionPenalty,
    Samples,
    Seed,
    Share,
    Stop,
    Temperature,
    TopK,
)
from kt_runtime.serve.requests.bodies.free_json import Grammar, StopPattern

INTERNAL = "SGLang sets it itself"
NO_PROCESSORS = "it is for logit processors of the client's own, which are code"
NO_WATERMARK = "watermarks are not offered"
NO_BEAMS = "beam search is not offered"


class SamplingParams(Body, kw_only=True):
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    n: Samples = 1  # null would fail in SGLang's comparison
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    sampling_seed: Seed | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    stop_token_ids: FewTokenIds | None = None
    stop_regex: StopPattern | None = None
    json_schema: Grammar | None = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    structural_tag: Grammar | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=LARGEST_INT32)] | None = None

    left_out: ClassVar[dict[str, str]] = {
        "beam_width": NO_BEAMS,
        "custom_params": NO_PROCESSORS,
        "watermark": NO_WATERMARK,
        **dict.fromkeys(
            ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"), INTERNAL
        ),
        "ebnf_full_assistant": INTERNAL,
    }
