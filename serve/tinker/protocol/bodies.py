"""The JSON bodies of the Tinker API, as SDK versions 0.7 to 0.38 send them.

Settings of training and sampling with an unknown field are refused, so that no option is silently ignored. The other
bodies ignore fields of newer clients. Source: `tinker.types` of the SDK.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kt_runtime.errors import InvalidValueError

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Seed = Annotated[int, Meta(ge=-(2**53), le=2**53)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TinkerPath = Annotated[str, Meta(min_length=1, max_length=1024)]
SavedName = Annotated[str, Meta(max_length=1024)]
MAX_SAMPLES = 128
MAX_TOP = 1024
MAX_STOPS = 1024


class Body(msgspec.Struct, kw_only=True):
    """Unknown fields are ignored."""


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused."""


class CreateSession(Body):
    tags: list[str] = msgspec.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""


class SessionHeartbeat(Body):
    session_id: Id


class LoraConfig(Settings):
    rank: int
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class OfModel(Body):
    """get_info, unload_model."""

    model_id: Id


class AdamParams(Settings):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """`adam_params` stays raw: a wrong setting must not lose the call's place in the order."""

    model_id: Id
    seq_id: Number | None = None
    adam_params: msgspec.Raw = msgspec.Raw(b"{}")
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """save_weights, save_weights_external."""

    model_id: Id
    path: SavedName | None = None
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(Body):
    model_id: Id
    path: SavedName | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class LoadWeights(Body):
    """Into a run (`model_id`, `seq_id`), or as the beginning of a new one (`session_id`, `model_seq_id`)."""

    path: TinkerPath
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Body):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: TinkerPath | None = None


class SamplingParams(Settings):
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str | TokenId], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e3)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class EncodedText(Settings):
    tokens: list[TokenId]
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(Settings):
    chunks: list[EncodedText]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sample(Settings):
    """One of `sampling_session_id`, `model_path` and `base_model`; SDKs before sampling sessions send the others."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    model_path: TinkerPath | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0
    topk_sample_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


class RetrieveFuture(Body):
    request_id: Id
    allow_metadata_only: bool = False


class OfPath(Body):
    tinker_path: TinkerPath


class JsonTensor(Settings):
    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: None = None
    sparse_col_indices: None = None


class JsonDatum(Settings):
    model_input: ModelInput
    loss_fn_inputs: dict[str, JsonTensor]


class JsonInput(Settings):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonForward(Body):
    model_id: Id
    forward_input: JsonInput
    seq_id: Number | None = None
    forward_only: bool = True


class JsonForwardBackward(Body):
    model_id: Id
    forward_backward_input: JsonInput
    seq_id: Number | None = None
    forward_only: bool = False


_B = TypeVar("_B")


def decoded(body: bytes, body_type: type[_B]) -> _B:
    """Raises InvalidValueError for invalid JSON, and for a value that does not fit `body_type`."""
    try:
        return msgspec.json.decode(body, type=body_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"the body: {error}") from None
