"""Bodies and query strings of the fine-tuning API.

Source: OpenAI's API reference, and `openai.types.fine_tuning` of its Python client 2.8.0. `max_completion_tokens` is
kt-runtime's own.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kt_runtime.serve.requests.bodies.bounds import Body, Name

MethodName: TypeAlias = Literal["supervised", "dpo", "reinforcement"]
METHODS: tuple[MethodName, ...] = ("supervised", "dpo", "reinforcement")

MAX_BATCH = 256
Auto: TypeAlias = Literal["auto"]
Epochs: TypeAlias = Annotated[int, Meta(ge=1, le=100)] | Auto | None
BatchSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_BATCH)] | Auto | None
Multiplier: TypeAlias = Annotated[float, Meta(gt=0, le=1000)] | Auto | None
Beta: TypeAlias = Annotated[float, Meta(gt=0, le=100)] | Auto | None
Compute: TypeAlias = Annotated[float, Meta(ge=0.25, le=8)] | Auto | None
Steps: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)] | Auto | None
OneSample: TypeAlias = Annotated[int, Meta(ge=1, le=1)] | Auto | None
AnswerTokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)] | Auto | None
FileId: TypeAlias = Annotated[str, Meta(max_length=64)]


class Supervised(Body, kw_only=True):
    """`learning_rate_multiplier` multiplies the rate of `recipe.RATES`. "auto" and null: `recipe` decides."""

    n_epochs: Epochs = None
    batch_size: BatchSize = None
    learning_rate_multiplier: Multiplier = None


class Dpo(Supervised, kw_only=True):
    beta: Beta = None


class Reinforcement(Supervised, kw_only=True):
    """`compute_multiplier` multiplies the answers to a prompt. `eval_interval`: in steps. `max_completion_tokens`: of a
    sampled answer."""

    compute_multiplier: Compute = None
    eval_interval: Steps = None
    eval_samples: OneSample = None
    reasoning_effort: Literal["default", "low", "medium", "high"] | None = None
    max_completion_tokens: AnswerTokens = None


Hyperparameters: TypeAlias = Supervised | Dpo | Reinforcement


class SupervisedMethod(Body, kw_only=True):
    hyperparameters: Supervised | None = None


class DpoMethod(Body, kw_only=True):
    hyperparameters: Dpo | None = None


class ReinforcementMethod(Body, kw_only=True):
    left_out: ClassVar[dict[str, str]] = {"response_format": "answers are sampled without a grammar"}

    grader: dict[str, Any]
    hyperparameters: Reinforcement | None = None


class Method(Body, kw_only=True):
    type: MethodName
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None
    reinforcement: ReinforcementMethod | None = None


class CreateJob(Body, kw_only=True):
    """`hyperparameters`: the older place of those of method supervised. `seed`: of LoRA's A and the order of rows."""

    null_is_left_out: ClassVar[bool] = True
    left_out: ClassVar[dict[str, str]] = {"integrations": "the server sends a job's figures nowhere; read its events"}

    model: Name
    training_file: FileId
    validation_file: FileId | None = None
    method: Method | None = None
    hyperparameters: Supervised | None = None
    suffix: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None


class PageQuery(Body, kw_only=True):
    """`after`: the id of the last entry of the page before."""

    after: FileId | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class FilesQuery(Body, kw_only=True):
    after: FileId | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Name | None = None


def given(hyperparameters: Hyperparameters | None) -> dict[str, Any]:
    """The values that the client decides: neither null nor "auto"."""
    values = msgspec.to_builtins(hyperparameters) if hyperparameters is not None else {}
    return {name: value for name, value in values.items() if value not in (None, "auto")}
