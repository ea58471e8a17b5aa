"""A training call of a client, in protobuf or JSON, as the resident's batch and loss.

Reading has two steps, so that a call with wrong content still takes its place in the run's order: `TrainingCall` has
the run and the `seq_id`; `TrainingCall.read` checks and translates the rest when the call's turn comes.

A policy loss of the Tinker API has no weights: the client sends advantage 0 and log-probability 0 for the tokens of a
prompt. Exactly these get weight 0 here, so that they enter no loss, no mean ratio and no metric. With `weights` or
`mask` the client says itself which targets count.

Tinker's protocol has no field for routes. `loss_fn_config` may have `routing_replay`: off (or 0), compare, or rollout
(or 1) for SDKs that send numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.serve.tinker.protocol import bodies
from kt_runtime.serve.tinker.protocol.schema import ForwardBackwardRequest
from kt_runtime.serve.tinker.protocol.tensors import Array, array_of_json, array_of_message, token_array
from kt_runtime.wire import Batch, Samples
from kt_runtime.wire.messages import CLIP_BOUNDS, ROUTING_REPLAY, CrossEntropy, Loss, PolicyLoss, RoutingReplay

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
LOSSES = ("cross_entropy", *POLICY_LOSSES)
CLIP_FIELDS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
REPLAY_FIELD = "routing_replay"
REPLAY_NUMBERS: dict[float | str, RoutingReplay] = {0: "off", 1: "rollout"}
WEIGHTS = ("weights", "mask")
MAX_DATA = 65536


@dataclass(frozen=True)
class Datum:
    """`tokens` int32 [n]; `inputs`: name -> array [n]."""

    tokens: npt.NDArray[np.int32]
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class TrainingBatch:
    """What the resident gets. `samples`: with a policy loss."""

    batch: Batch
    loss: Loss
    samples: Samples | None
    routing_replay: RoutingReplay = "off"

    @property
    def arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {
            "tokens": self.batch.tokens,
            "targets": self.batch.targets,
            "weights": self.batch.weights,
        }
        if self.samples is not None:
            arrays |= {"sampled": self.samples.logprobs, "advantages": self.samples.advantages}
        return arrays


@dataclass(frozen=True)
class TrainingCall:
    """`seq_id` None: the client sends none. `num_bytes`: of the body. `read(context_tokens)` raises
    InvalidValueError, UnknownNameError for content that the resident can't take."""

    model_id: str
    seq_id: int | None
    forward_only: bool
    num_bytes: int
    read: Callable[[int], TrainingBatch]


def call_from_protobuf(body: bytes) -> TrainingCall:
    """Raises InvalidValueError for bytes that are no `ForwardBackwardRequest`."""
    message = ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidValueError("the body is no protobuf ForwardBackwardRequest") from None
    return TrainingCall(
        message.model_id,
        message.seq_id,
        message.forward_only,
        len(body),
        lambda context_tokens: _read_message(message, context_tokens),
    )


def call_from_json(body: bytes, *, forward_only: bool) -> TrainingCall:
    """`forward_only`: the body of /forward, with `forward_input`. Raises InvalidValueError."""
    request: bodies.JsonForward | bodies.JsonForwardBackward
    if forward_only:
        request = bodies.decoded(body, bodies.JsonForward)
        given = request.forward_input
    else:
        request = bodies.decoded(body, bodies.JsonForwardBackward)
        given = request.forward_backward_input
    return TrainingCall(
        request.model_id,
        request.seq_id,
        forward_only or request.forward_only,
        len(body),
        lambda context_tokens: _translated(
            [_json_datum(index, datum) for index, datum in enumerate(given.data)],
            given.loss_fn,
            given.loss_fn_config or {},
            context_tokens,
        ),
    )


def _read_message(message: Any, context_tokens: int) -> TrainingBatch:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = [_message_datum(index, datum) for index, datum in enumerate(message.data)]
    return _translated(data, message.loss_fn, config, context_tokens)


def _message_datum(index: int, datum: Any) -> Datum:
    tokens = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise InvalidValueError(f"data[{index}]: a picture or sound; this model reads text only")
        tokens.append(token_array(chunk.encoded_text.tokens, f"data[{index}]: tokens"))
    inputs = {name: array_of_message(value, f"data[{index}]: {name}") for name, value in datum.loss_fn_inputs.items()}
    return Datum(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs)


def _json_datum(index: int, datum: bodies.JsonDatum) -> Datum:
    tokens = [token for chunk in datum.model_input.chunks for token in chunk.tokens]
    inputs = {
        name: array_of_json(value.data, value.dtype, value.shape, f"data[{index}]: {name}")
        for name, value in datum.loss_fn_inputs.items()
    }
    return Datum(array_of_json(tokens, "int64", None, f"data[{index}]: tokens"), inputs)


def _translated(
    data: list[Datum], loss_fn: str, config: Mapping[str, float | str], context_tokens: int
) -> TrainingBatch:
    replay = replay_of(config)
    loss = loss_of(loss_fn, {key: value for key, value in config.items() if key != REPLAY_FIELD})
    if not 1 <= len(data) <= MAX_DATA:
        raise InvalidValueError(f"{len(data)} data; allowed are 1 to {MAX_DATA}")
    for index, datum in enumerate(data):
        _check(index, datum, loss_fn, context_tokens)
    lengths = [len(datum.tokens) for datum in data]
    weights = np.concatenate([_weights(datum, loss_fn) for datum in data])
    batch = Batch(np.concatenate([datum.tokens for datum in data]), _joined(data, "target_tokens"), weights, lengths)
    samples = None
    if isinstance(loss, PolicyLoss):
        samples = Samples(_joined(data, "logprobs"), _joined(data, "advantages"))
    return TrainingBatch(batch, loss, samples, replay)


def replay_of(config: Mapping[str, float | str]) -> RoutingReplay:
    """Raises UnknownNameError for another value than those of the wire protocol, or 0 and 1."""
    asked = config.get(REPLAY_FIELD, "off")
    for known in ROUTING_REPLAY:
        if known == asked:
            return known
    if asked not in REPLAY_NUMBERS:
        raise UnknownNameError("value", str(asked), ROUTING_REPLAY, f"loss_fn_config: {REPLAY_FIELD}")
    return REPLAY_NUMBERS[asked]


def loss_of(name: str, config: Mapping[str, float | str]) -> Loss:
    """The resident's loss. Raises UnknownNameError, InvalidValueError for a setting that the loss does not know."""
    if name not in LOSSES:
        raise UnknownNameError("loss", name, LOSSES)
    allowed = {**(CLIP_FIELDS if name in CLIP_BOUNDS else {}), **({"beta": "beta"} if name == "dro" else {})}
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key not in allowed:
            known = ", ".join(allowed) or "none"
            raise InvalidValueError(f"loss_fn_config: {name} has no setting {key!r}; it has: {known}")
        if not isinstance(value, float | int):
            raise InvalidValueError(f"loss_fn_config: {key} is {value!r}; it must be a number")
        settings[allowed[key]] = float(value)
    return CrossEntropy() if name == "cross_entropy" else PolicyLoss(kind=name, **settings)  # type: ignore[arg-type]


def _check(index: int, datum: Datum, loss_fn: str, context_tokens: int) -> None:
    number = len(datum.tokens)
    if not 1 <= number <= context_tokens:
        raise InvalidValueError(
            f"data[{index}]: {number} tokens; allowed are 1 to {context_tokens}, the context length"
        )
    needed = ("target_tokens",) if loss_fn == "cross_entropy" else ("target_tokens", "logprobs", "advantages")
    for name in needed:
        if name not in datum.inputs:
            raise InvalidValueError(f"data[{index}]: no {name}; {loss_fn} needs {', '.join(needed)}")
    for name, values in datum.inputs.items():
        if name not in (*needed, *WEIGHTS):
            raise InvalidValueError(
                f"data[{index}]: {loss_fn} has no input {name!r}; it has: {', '.join((*needed, *WEIGHTS))}"
            )
        if len(values) != number:
            raise InvalidValueError(f"data[{index}]: {len(values)} {name} for {number} tokens")


def _weights(datum: Datum, loss_fn: str) -> Array:
    for name in WEIGHTS:
        if name in datum.inputs:
            return datum.inputs[name].astype(np.float32)
    if loss_fn == "cross_entropy":
        return np.ones(len(datum.tokens), np.float32)
    counted = (datum.inputs["advantages"] != 0) | (datum.inputs["logprobs"] != 0)
    weights: Array = counted.astype(np.float32)
    return weights


def _joined(data: list[Datum], name: str) -> Array:
    joined: Array = np.concatenate([datum.inputs[name] for datum in data])
    return joined
