"""Results of training and sampling calls, in protobuf and in JSON. Arrays are float32 and int32 unless stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.serve.tinker.protocol.schema import (
    FLOAT32,
    REACHED_LENGTH,
    STOPPED,
    ForwardBackwardOutput,
    SampleResponse,
)
from kt_runtime.wire.messages import PolicyLoss
from kt_runtime.wire.replies import ForwardReply

Floats = npt.NDArray[np.float32]
OUTPUT_TYPE = "ArrayRecord"
EMPTY_LOGPROB = -99999.0
TopOfToken = list[tuple[int, float]]
"""The most probable tokens at one place and their log-probabilities; fewer than asked for if there are no more."""


@dataclass(frozen=True)
class JsonResult:
    """A result that has no protobuf form."""

    value: dict[str, Any]
    num_bytes = 1024

    def json(self) -> dict[str, Any]:
        return self.value

    def protobuf(self) -> bytes | None:
        return None


@dataclass(frozen=True)
class ForwardResult:
    """`logprobs`: of each datum's targets. `metrics`: named NAME:REDUCTION, as the SDK merges them over chunks."""

    logprobs: Sequence[Floats]
    metrics: dict[str, float]

    @property
    def num_bytes(self) -> int:
        """The approximate memory of the result."""
        return 1024 + sum(values.nbytes for values in self.logprobs)

    def json(self) -> dict[str, Any]:
        outputs = [
            {"logprobs": {"data": values.tolist(), "dtype": "float32", "shape": [len(values)]}}
            for values in self.logprobs
        ]
        return {"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": self.metrics}

    def protobuf(self) -> bytes:
        message = ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
        message.metrics.update(self.metrics)
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(self.logprobs))
        ends = np.cumsum([0, *(4 * len(values) for values in self.logprobs)])
        batched = record.fields["logprobs"]
        batched.data = np.concatenate(self.logprobs).astype("<f4").tobytes()
        batched.offsets = ends.astype("<i8").tobytes()
        batched.dtype = FLOAT32
        data: bytes = message.SerializeToString()
        return data


def metrics_of(reply: ForwardReply, loss: object) -> dict[str, float]:
    """`kl/k1`, `kl/k3` and `clip_fraction` are means over the counted targets of a policy loss."""
    metrics = {"loss:sum": reply.loss, "tokens:sum": float(reply.num_tokens), "seconds:sum": reply.seconds}
    metrics |= {f"{name}:sum": value for name, value in reply.metrics.items() if name.startswith("routes/")}
    if not isinstance(loss, PolicyLoss):
        return {**metrics, "correct:sum": float(reply.num_correct)}
    counted = reply.metrics.get("tokens", 0.0)
    for name, shown in (("kl/k1", "kl/k1"), ("kl/k3", "kl/k3"), ("clipped", "clip_fraction")):
        total = reply.metrics.get(name, 0.0)
        metrics[f"{name}:sum"] = total
        metrics[f"{shown}:mean"] = total / counted if counted else 0.0
    return {**metrics, "counted:sum": counted}


@dataclass(frozen=True)
class SampledSequence:
    """`top`: for each token, where the client asked for it."""

    tokens: list[int]
    logprobs: list[float]
    is_stopped: bool
    top: list[TopOfToken] | None = None


@dataclass(frozen=True)
class SampleResult:
    """`prompt_logprobs`, `prompt_top`: one entry per token of the prompt, None where nothing was computed.

    `adapter_version`: the hash of the adapter version that sampled every token, empty for the base; not part of
    Tinker's protocol. `cached_tokens`: of the prompt, found in the prefix cache.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    prompt_top: list[TopOfToken | None] | None = None
    cached_tokens: int = 0
    adapter_version: str = field(default="", compare=False)

    @property
    def num_bytes(self) -> int:
        """The approximate memory of the result: Python's numbers, and pairs of them for the top tokens."""
        top = [one.top for one in self.sequences] + [self.prompt_top]
        pairs = sum(len(entries or ()) for places in top for entries in places or ())
        numbers = 2 * sum(len(one.tokens) for one in self.sequences) + len(self.prompt_logprobs or ())
        return 1024 + 32 * numbers + 128 * pairs

    def json(self) -> dict[str, Any]:
        sequences: list[dict[str, Any]] = [
            {
                "stop_reason": "stop" if one.is_stopped else "length",
                "tokens": one.tokens,
                "logprobs": one.logprobs,
                **({"topk_logprobs": one.top} if one.top is not None else {}),
            }
            for one in self.sequences
        ]
        return {
            "type": "sample",
            "sequences": sequences,
            "prompt_logprobs": self.prompt_logprobs,
            "topk_prompt_logprobs": self.prompt_top,
            "prompt_cache_hit_tokens": self.cached_tokens,
            "adapter_version": self.adapter_version,
        }

    def protobuf(self) -> bytes:
        message = SampleResponse(prompt_cache_hit_tokens=self.cached_tokens)
        for one in self.sequences:
            sequence = message.sequences.add(
                stop_reason=STOPPED if one.is_stopped else REACHED_LENGTH,
                tokens=np.array(one.tokens, "<i4").tobytes(),
                logprobs=np.array(one.logprobs, "<f4").tobytes(),
            )
            if one.top is not None:
                _fill_top(sequence.topk_sampled_logprobs, one.top)
        if self.prompt_logprobs is not None:
            filled = [np.nan if value is None else value for value in self.prompt_logprobs]
            message.prompt_logprobs = np.array(filled, "<f4").tobytes()
        if self.prompt_top is not None:
            _fill_top(message.topk_prompt_logprobs, self.prompt_top)
        data: bytes = message.SerializeToString()
        return data


def _fill_top(message: Any, top: Sequence[TopOfToken | None]) -> None:
    """Empty places hold the SDK's own mark: token 0 with `EMPTY_LOGPROB`."""
    k = max((len(entries) for entries in top if entries), default=0)
    ids, logprobs = np.zeros((len(top), k), "<i4"), np.full((len(top), k), EMPTY_LOGPROB, "<f4")
    for row, entries in enumerate(top):
        for column, (token, logprob) in enumerate(entries or ()):
            ids[row, column], logprobs[row, column] = token, logprob
    message.token_ids, message.logprobs, message.k, message.length = ids.tobytes(), logprobs.tobytes(), k, len(top)


Result = JsonResult | ForwardResult | SampleResult
