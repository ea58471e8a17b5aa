"""The protocol's requests: of trainer and frontend to the resident, and `MoveName` to the frontend.

A message is a msgpack map with its kind in `type`; arrays follow as raw buffers in separate frames (`codec.py`).
Unknown fields of a request are an error, so a misspelt option is never ignored. All token arrays are flat: the
sequences of a batch one after the other, with their `lengths`.

The client chooses a `request_id` for every request. A retry under the same id does not run the request again: the
server replies with the first answer.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from kt_runtime.errors import InvalidValueError

PROTOCOL_VERSION = 7
"""Sent with every request. Any incompatible change increments it: a request field is added, removed or changes its
meaning; a reply field is removed or changes its meaning. A new reply field is compatible, since clients ignore unknown
fields of replies. `ErrorReply` never changes, so that a client of another version can read the error that reports the
version mismatch.
"""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}\Z")]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Lengths = Annotated[list[Positive], msgspec.Meta(min_length=1, max_length=65536)]
PathText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""A path on the resident's file system; at most Linux's PATH_MAX characters."""

LoraTarget = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "optim_step": {
        "learning_rate": (0.0, 1e4),
        "epsilon": (1e-30, 1e4),
        "weight_decay": (0.0, 1e4),
        "max_grad_norm": (0.0, 1e18),
        "lora_plus_ratio": (1e-4, 1e4),
    },
    "lora": {"alpha": (1e-6, 1e6)},
    "preference loss": {
        "beta": (1e-9, 1e6),
        "ftx": (0.0, 1e6),
        "gamma": (0.0, 1e6),
        "scale": (1e-12, 1e6),
    },
}
"""Lowest and highest allowed value of each setting, inclusive: far wider than useful values, but safe in float32."""


def _check_ranges(what: str, message: msgspec.Struct) -> None:
    for name, (lowest, highest) in RANGES[what].items():
        value = getattr(message, name)
        if math.isfinite(value) and not lowest <= value <= highest:  # the codec refuses what is not finite
            raise InvalidValueError(f"{what}: {name} is {value!r}; allowed are {lowest:g} to {highest:g}")


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    version: int = PROTOCOL_VERSION
    request_id: RequestId


class LoraSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`alpha` is the value that serving uses: the scaling is always alpha / rank. A client folds rsLoRA into `alpha`.

    `targets`: module names ("q_proj", "kv_b_proj", "experts", ...) or groups ("all", "attention", "mlp", "shared",
    "experts"). `seed` fixes the initial A matrices.
    """

    rank: Positive
    alpha: Annotated[float, msgspec.Meta(gt=0)]
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    targets: Annotated[list[LoraTarget], msgspec.Meta(min_length=1, max_length=256)] = msgspec.field(
        default_factory=lambda: ["all"]
    )
    seed: int = 0

    def __post_init__(self) -> None:
        _check_ranges("lora", self)


class GetStatus(Request, tag="get_status"):
    """`verify_weights`: hash the model's weights again instead of replying with the known hash.

    `wait_s`: seconds that the reply may wait for the hash; after a start, computing it takes a pass over all weights.
    When they are over, the reply comes without the hash. None, or with `verify_weights`: the reply waits for the hash.
    """

    verify_weights: bool = False
    wait_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class CreateSession(Request, tag="create_session"):
    """Opens a training session: one adapter's fp32 master weights and optimizer state on top of the shared base.

    `start_from`: a PEFT directory on the resident's file system with initial values of the masters. `reference`: a
    second PEFT directory, of any rank and targets that the server can serve, which stays frozen. `Forward` with the
    model "reference" computes with this adapter, or with the base alone if there is none.

    `publishes`: the name under which the session will publish. The session owns this name until the session ends.
    ConflictError if another session publishes the name, unless `take_over`.
    """

    session: Name
    lora: LoraSettings
    start_from: PathText | None = None
    reference: PathText | None = None
    publishes: Name | None = None
    take_over: bool = False


class CrossEntropy(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="cross_entropy", tag_field="name"):
    """sum(weights * -logprob). A sum, so that calls add up exactly; the client normalises through the weights."""


class PreferenceLoss(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="preference", tag_field="name"):
    """`scale` * the sum over pairs of sequences. Sequence 2 i is the chosen answer of pair i, 2 i + 1 the rejected one.

    A target counts if its weight is not 0; the weight's value does not matter. Each sequence has a counted target.
    `kt_runtime.resident.training.preference` has the formulas. `label_smoothing` is for sigmoid only, `gamma` for simpo
    only. `ftx`: adds ftx * the mean -logprob of the chosen answer, with any kind.
    """

    kind: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"]
    beta: Annotated[float, msgspec.Meta(gt=0)]
    label_smoothing: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0
    ftx: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    gamma: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        _check_ranges("preference loss", self)
        for name, kind in (("label_smoothing", "sigmoid"), ("gamma", "simpo")):
            if getattr(self, name) and self.kind != kind:
                raise InvalidValueError(
                    f"preference loss {self.kind!r}: {name} is {getattr(self, name)}; only {kind!r} knows it"
                )

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs a reference model's log-probabilities."""
        return self.kind in ("sigmoid", "hinge", "ipo")


class PolicyLoss(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="policy", tag_field="name"):
    """A policy-gradient loss over sampled tokens: `kt_runtime.resident.training.policy` has the formulas.

    A target counts if its weight is not 0; the weight multiplies the target's loss. `clip_low`, `clip_high`: bounds of
    the probability ratio, for ppo, cispo and gspo; None: the kind's own of `CLIP_BOUNDS`. `beta`: for dro only, which
    needs it.
    """

    kind: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"]
    clip_low: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    clip_high: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None
    beta: Annotated[float, msgspec.Meta(ge=1e-9, le=1e6)] | None = None

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            if getattr(self, name) is not None and self.kind not in CLIP_BOUNDS:
                raise InvalidValueError(
                    f"policy loss {self.kind!r}: {name} is {getattr(self, name)}; only {', '.join(CLIP_BOUNDS)} clip"
                )
        if (self.beta is not None) != (self.kind == "dro"):
            problem = "needs beta" if self.kind == "dro" else f"beta is {self.beta}; only 'dro' knows it"
            raise InvalidValueError(f"policy loss {self.kind!r}: {problem}")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest ratio. Only for a kind that clips."""
        low, high = CLIP_BOUNDS[self.kind]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def penalty(self) -> float:
        """dro's beta."""
        assert self.beta is not None
        return self.beta


CLIP_BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}

Loss = CrossEntropy | PreferenceLoss | PolicyLoss
Model = Literal["policy", "base", "reference"]
Activations = Literal["recompute", "retain"]
RoutingReplay = Literal["off", "compare", "rollout"]
ROUTING_REPLAY: tuple[RoutingReplay, ...] = ("off", "compare", "rollout")
RolloutVersion = Annotated[str, msgspec.Meta(max_length=128)]


class Forward(Request, tag="forward"):
    """Log-probabilities of the targets and the loss; state is unchanged.

    Buffers: `tokens` int32 [N], `targets` int32 [N] (already shifted: targets[i] is the token after tokens[i]),
    `weights` float32 [N], N = sum(lengths). `model`: "policy" (the base with the session's adapter), "base" or
    "reference". No dropout.

    A `PolicyLoss` requires two more buffers: `sampled` and `advantages` float32 [N], the log-probabilities with which
    the targets were sampled, and their advantages.

    With model "policy", a `PreferenceLoss` that `has_reference` requires a fourth buffer: `reference` float32 [number
    of sequences], the sum of the reference's log-probabilities over each sequence's counted targets. With another
    model there is no fourth buffer: the model is its own reference.

    `routing_replay`, for model "policy" and a server with `--routing-replay`: "rollout" gives each token the experts
    that the router chose for it when the server computed the same tokens in a request, with weights of the present
    logits; "compare" only counts the tokens for which it would choose others now. `rollout_version`: the content hash
    of the adapter version that sampled, "" for the base; None: of the session's published versions the one that has
    computed most of a sequence, newer ones first; the base if there is none. Tokens whose routes are not kept are
    routed as always.
    """

    session: Name
    lengths: Lengths
    loss: Loss = msgspec.field(default_factory=CrossEntropy)
    model: Model = "policy"
    routing_replay: RoutingReplay = "off"
    rollout_version: RolloutVersion | None = None


class ForwardBackward(Request, tag="forward_backward"):
    """`Forward` with model "policy" and the session's dropout, then backward: accumulates the loss's gradient.

    `activations`: "recompute": backward recomputes each layer (activation checkpointing); "retain": forward keeps the
    activations in memory. Both give the same result. `routing_replay`, `rollout_version`: as of `Forward`; gradients
    reach a replayed router's logits through the weights alone.
    """

    session: Name
    lengths: Lengths
    loss: Loss = msgspec.field(default_factory=CrossEntropy)
    activations: Activations = "recompute"
    routing_replay: RoutingReplay = "off"
    rollout_version: RolloutVersion | None = None


class OptimStep(Request, tag="optim_step"):
    """One AdamW step over the accumulated gradient, which is then cleared.

    The gradient is clipped to the global L2 norm `max_grad_norm` (0: no clipping). A gradient with NaN or Inf is an
    error: the masters stay unchanged and the accumulated gradient is cleared.
    """

    session: Name
    learning_rate: Annotated[float, msgspec.Meta(ge=0)]
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, msgspec.Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_grad_norm: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    lora_plus_ratio: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        _check_ranges("optim_step", self)


class Save(Request, tag="save"):
    """Writes the adapter as a PEFT directory at `path`; `optimizer`: with the optimizer's state.

    `replace`: `path` may be an empty directory, or one that `Save` wrote and that holds no other files. The new
    directory takes its place once complete.
    """

    session: Name
    path: PathText
    optimizer: bool = True
    replace: bool = False


class Load(Request, tag="load"):
    """Restores the masters (and optimizer state, if the directory holds it) from a directory written by `Save`."""

    session: Name
    path: PathText


class Publish(Request, tag="publish"):
    """Makes a new version from the session's masters and moves adapter `name` to it, without a reload.

    The session then owns the name until the session ends. Without `take_over`, a ConflictError if another session
    publishes the name, or if this session lost the name because it was taken over or unloaded.
    """

    session: Name
    name: Name
    take_over: bool = False


class CloseSession(Request, tag="close_session"):
    session: Name


class LoadAdapter(Request, tag="load_adapter"):
    """Validates the PEFT directory at `path`, installs it as a version and moves adapter `name` to it.

    Without `take_over`, a ConflictError if a session publishes the name.
    """

    name: Name
    path: PathText
    take_over: bool = False


class FollowAdapter(Request, tag="follow_adapter"):
    """As `LoadAdapter`, for a version that another server published: its content must have the hash `adapter_version`.

    The name's owner does not change: a session that publishes it stays its owner. `source`: where the version came
    from, for users.
    """

    name: Name
    path: PathText
    adapter_version: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    source: Annotated[str, msgspec.Meta(max_length=8192)] = ""


class RollbackAdapter(Request, tag="rollback_adapter"):
    """Moves adapter `name` back to `adapter_version` (a content hash or its prefix); None: the previous version."""

    name: Name
    adapter_version: Annotated[str, msgspec.Meta(max_length=128)] | None = None


class ListAdapters(Request, tag="list_adapters"):
    pass


class ForgetAdapter(Request, tag="forget_adapter"):
    """The frontend has unloaded adapter `name`: forget its current version. The versions on disk stay.

    Publications of the name that are in progress fail with a ConflictError. Exception: if the frontend was already
    asked to move the name, that publication completes first.
    """

    name: Name


class DropAdapter(Request, tag="drop_adapter"):
    """Frees the serving copy `lora_id`. The frontend sends this message when the copy's last request has ended."""

    lora_id: Annotated[str, msgspec.Meta(max_length=128)]


class ChangeSettings(Request, tag="change_settings"):
    """Changes settings of the running server, or replies with them if `changes` is empty (`wire.settings.changed`)."""

    changes: Annotated[dict[str, Any], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)


class MoveName(Request, tag="move_name"):
    """Resident to frontend: from now on adapter `name` means `lora_id`. The reply is `DoneReply`.

    Only the frontend accepts this request, and no other one: it is not part of `AnyRequest`. `expires_at`:
    CLOCK_MONOTONIC in seconds, when the resident stops waiting. The frontend must not move the name later.
    """

    name: Name
    adapter_version: Annotated[str, msgspec.Meta(max_length=128)]
    lora_id: Annotated[str, msgspec.Meta(max_length=128)]
    expires_at: float


AnyRequest = (
    GetStatus
    | CreateSession
    | Forward
    | ForwardBackward
    | OptimStep
    | Save
    | Load
    | Publish
    | CloseSession
    | LoadAdapter
    | FollowAdapter
    | RollbackAdapter
    | ListAdapters
    | ForgetAdapter
    | DropAdapter
    | ChangeSettings
)
