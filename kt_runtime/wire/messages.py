"""The training protocol's messages: what a trainer asks of the resident process, and what it gets back.

A message is a msgpack map with its kind in `type`; arrays travel beside it as raw buffers (`codec.py` describes the
frames). Unknown fields of a request are an error, so that a misspelt option is never ignored. All token arrays are
flat, the sequences of a batch one after the other, with `lengths` saying where each ends.

Every request carries a `request_id` chosen by the client. A request that is sent again under the same id is not carried
out again: it gets the first answer.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from kt_runtime.errors import InvalidValueError

PROTOCOL_VERSION = 3
"""Of requests. It rises with every change that one side would read in another way than the other, or refuse: a field of
a request that comes, goes or means something else; a field of a reply that goes or means something else. It does not
rise when a reply gets a field: clients ignore the fields of replies that they don't know. `ErrorReply` never changes,
since it is what tells a client of another version so.
"""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}\Z")]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Lengths = Annotated[list[Positive], msgspec.Meta(min_length=1, max_length=65536)]
PathText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""A path on the resident's file system; PATH_MAX of Linux."""

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
"""Lowest and highest value of each number that is computed with, both allowed: far beyond what trains, within float32.
"""


def _check_ranges(what: str, message: msgspec.Struct) -> None:
    for name, (lowest, highest) in RANGES[what].items():
        value = getattr(message, name)
        if math.isfinite(value) and not lowest <= value <= highest:  # the codec refuses what is not finite
            raise InvalidValueError(f"{what}: {name} is {value!r}; allowed are {lowest:g} to {highest:g}")


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    version: int = PROTOCOL_VERSION
    request_id: RequestId


class LoraSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`alpha` is the served one: scaling is always alpha / rank. A client folds rsLoRA into it.

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
    """`verify_weights`: hash the model's weights anew instead of answering with the hash that is known.

    `wait_s`: how long the answer may wait for that hash, which takes a pass over all weights after the start. After it
    the answer comes without. None: as long as it takes, as with `verify_weights`.
    """

    verify_weights: bool = False
    wait_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class CreateSession(Request, tag="create_session"):
    """Opens a training session: one adapter's fp32 masters and its optimizer state beside the shared base.

    `start_from`: a PEFT directory on the resident's file system whose tensors the masters begin with. `reference`:
    another one, of any rank and targets that the server can serve, which stays as it is; `Forward` with the model
    "reference" computes with it, or with the base alone where there is none.

    `publishes`: the name that the session is going to publish. It is the session's own from now on, until it ends: a
    ConflictError, unless `take_over`, if another session publishes that name.
    """

    session: Name
    lora: LoraSettings
    start_from: PathText | None = None
    reference: PathText | None = None
    publishes: Name | None = None
    take_over: bool = False


class CrossEntropy(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="cross_entropy", tag_field="name"):
    """sum(weights * -logprob): a sum, so that calls add up exactly; the client normalises through the weights."""


class PreferenceLoss(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="preference", tag_field="name"):
    """`scale` * the sum over pairs of sequences, 2 i the chosen answer and 2 i + 1 the rejected one.

    A target counts where its weight is not 0; the weights' values don't matter. Each sequence has a counted target.
    The formulas are in `kt_runtime.resident.training.preference`. `label_smoothing` is for sigmoid alone, `gamma` for
    simpo.
    `ftx`: adds ftx * the mean -logprob of the chosen answer, with any kind.
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
        """Whether the loss compares with a reference's log-probabilities."""
        return self.kind in ("sigmoid", "hinge", "ipo")


Loss = CrossEntropy | PreferenceLoss
Model = Literal["policy", "base", "reference"]
Activations = Literal["recompute", "retain"]


class Forward(Request, tag="forward"):
    """Log-probabilities of the targets and the loss; state is unchanged.

    Buffers: `tokens` int32 [N], `targets` int32 [N] (already shifted: targets[i] is the token after tokens[i]),
    `weights` float32 [N], N = sum(lengths). `model`: what computes: the session's adapter, the base alone, or the
    session's reference. Nothing drops out.

    A `PreferenceLoss` that has a reference takes a fourth buffer where the model is the policy: `reference` float32
    [number of sequences], the sum of the reference's log-probabilities over each sequence's counted targets. Another
    model takes none: it is compared with itself.
    """

    session: Name
    lengths: Lengths
    loss: Loss = msgspec.field(default_factory=CrossEntropy)
    model: Model = "policy"


class ForwardBackward(Request, tag="forward_backward"):
    """As `Forward` of the policy, with the session's dropout, and adds the loss's gradient to the accumulated one.

    `activations`: whether backward recomputes each layer, or keeps what forward computed and takes memory for it; the
    result is the same.
    """

    session: Name
    lengths: Lengths
    loss: Loss = msgspec.field(default_factory=CrossEntropy)
    activations: Activations = "recompute"


class OptimStep(Request, tag="optim_step"):
    """One AdamW step over the accumulated gradient, which is then cleared.

    The gradient is clipped to the global L2 norm `max_grad_norm` (0: not clipped). A gradient with NaN or Inf is
    refused: the masters stay as they were and the accumulated gradient is cleared.
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
    """Writes the adapter as a PEFT directory at `path`, with the optimizer's state when `optimizer`.

    `replace`: an empty directory or one that `Save` wrote, and nothing has been added to, may be there; it is exchanged
    for the new one once that is whole.
    """

    session: Name
    path: PathText
    optimizer: bool = True
    replace: bool = False


class Load(Request, tag="load"):
    """Sets masters (and optimizer state, if the directory holds it) from a directory written by `Save`."""

    session: Name
    path: PathText


class Publish(Request, tag="publish"):
    """Makes a new version from the session's masters and moves adapter `name` to it, without a reload.

    The name is the session's own from then on, until it ends. A ConflictError, unless `take_over`, if another session
    publishes that name, or if it was taken over from this one or unloaded.
    """

    session: Name
    name: Name
    take_over: bool = False


class CloseSession(Request, tag="close_session"):
    session: Name


class LoadAdapter(Request, tag="load_adapter"):
    """Validates the PEFT directory at `path`, installs it as a version and moves adapter `name` to it.

    A ConflictError, unless `take_over`, if a session publishes that name.
    """

    name: Name
    path: PathText
    take_over: bool = False


class RollbackAdapter(Request, tag="rollback_adapter"):
    """Moves adapter `name` back to `adapter_version` (a content hash or a prefix of it); None: the one before."""

    name: Name
    adapter_version: Annotated[str, msgspec.Meta(max_length=128)] | None = None


class ListAdapters(Request, tag="list_adapters"):
    pass


class ForgetAdapter(Request, tag="forget_adapter"):
    """The frontend has taken adapter `name` away: forget its current version. The versions on disk stay.

    Publications of the name that are under way are answered with a ConflictError; one for which the frontend was asked
    already ends first.
    """

    name: Name


class DropAdapter(Request, tag="drop_adapter"):
    """Frees the serving copy `lora_id`. Sent by the frontend once the last request that uses it has ended."""

    lora_id: Annotated[str, msgspec.Meta(max_length=128)]


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
    | RollbackAdapter
    | ListAdapters
    | ForgetAdapter
    | DropAdapter
)


class Reply(msgspec.Struct, kw_only=True, tag_field="type"):
    """A later server's may have more fields: they are ignored."""

    request_id: str


class ErrorReply(Reply, tag="error"):
    """`category`: "user" (the request was wrong or its numbers overflow, don't resend) or "server" (ours).

    `kind` is the class name of `kt_runtime.errors`, so that the client raises the same error.
    """

    category: Literal["user", "server"]
    kind: str
    message: str


class SessionInfo(msgspec.Struct, kw_only=True):
    """`publishes`: names of adapters that are this session's own. `num_bytes`: what it may take, as the server's limit
    counts. `idle_s`: since a request of it last began; `age_s`: since it was opened. `num_requests`: of it, under way
    or waiting."""

    session: str
    rank: int
    alpha: float
    step: int
    modules: list[str]
    num_parameters: int
    num_bytes: int = 0
    idle_s: float = 0.0
    age_s: float = 0.0
    num_requests: int = 0
    publishes: list[str] = msgspec.field(default_factory=list)


class CacheTier(msgspec.Struct, kw_only=True):
    """One tier of the prefix cache, "device", "host" or "disk", counted from the server's start on.

    A page is the KV of `page_tokens` tokens, `page_bytes` bytes. `hits` and `misses`: pages that this tier was asked
    for and had or had not; what one tier misses, the next one is asked for. `evictions`: pages removed to make room.
    `bytes_read`, `bytes_written`: copied from and to the tier (0 on the device, where pages are used in place).
    `used_bytes`, `capacity_bytes`: what the `pages` in it take now, and may take.

    The disk's alone: `corrupt` records (each a miss too), `counters` (all of `kt_runtime.cache.counters`), `directory`,
    `read_only` (pages are never written there), and why it is not read or written just now (None: it is).
    """

    tier: str
    page_tokens: int
    page_bytes: int
    pages: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int = 0
    bytes_written: int = 0
    corrupt: int = 0
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    directory: str | None = None
    read_only: bool = False
    reading_stopped: str | None = None
    writing_stopped: str | None = None


class UnstoredVersion(msgspec.Struct, kw_only=True):
    """A version that is or was served and is not in the adapter directory. `is_waiting`: its writing is tried again."""

    name: str
    version: str
    reason: str
    is_waiting: bool


class UnforgottenName(msgspec.Struct, kw_only=True):
    """A name that was unloaded, and that a restart would serve again: the adapter directory could not be changed."""

    name: str
    reason: str


class StatusReply(Reply, tag="status"):
    """`fingerprint`: hash of the model's weights; empty while it is not known. Bytes: parameters shared with and copied
    from SGLang.

    `expert_threads`: CPU threads that compute routed experts. `expert_node_bytes`: their weights on each memory node.
    `expert_placement`: why the system did not put them there, empty where it did.

    `chunked_prefill_tokens`: prompt tokens that serving computes at once, 0: no limit. `microbatch_tokens`: padded
    tokens that training sends through a layer at once.

    `cache`: the prefix cache's tiers, nearest first; empty where the engine doesn't say. `not_stored`: versions of
    adapters that could not be written down. `not_forgotten`: unloaded names for which that could not be written down.
    `restoring`: names of an earlier run that are not served again yet.
    """

    runtime_version: str
    sglang_version: str
    model: str
    model_directory: str
    family: str
    fingerprint: str
    dtype: str
    device: str
    max_lora_rank: int
    context_tokens: int
    weights_shared_bytes: int
    weights_copied_bytes: int
    expert_format: str
    expert_isa: str
    expert_bytes: int
    expert_threads: int
    chunked_prefill_tokens: int
    microbatch_tokens: int
    rss_bytes: int
    sessions: list[SessionInfo]
    cache: list[CacheTier] = msgspec.field(default_factory=list)
    not_stored: list[UnstoredVersion] = msgspec.field(default_factory=list)
    not_forgotten: list[UnforgottenName] = msgspec.field(default_factory=list)
    restoring: list[str] = msgspec.field(default_factory=list)
    expert_node_bytes: list[int] = msgspec.field(default_factory=list)
    expert_placement: str = ""


class SessionReply(Reply, tag="session"):
    info: SessionInfo


class ForwardReply(Reply, tag="forward_result"):
    """Buffer: `logprobs` float32 [N], the log-probability of each target. `loss` is a sum, as the request's loss says.

    `metrics`: sums over the pairs of a `PreferenceLoss`, by the names under which LLaMA-Factory logs their means; empty
    otherwise. `num_correct`: tokens of a weight other than 0 whose most probable next token is the target.
    `num_computed`: tokens that went through the layers, a prompt that a pair shares once.
    """

    loss: float
    num_tokens: int
    seconds: float
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    num_correct: int = 0
    num_computed: int = 0


class OptimReply(Reply, tag="optim_result"):
    """`grad_norm` is the norm before clipping. `finished_at`: Unix time, seconds, at which the step had ended."""

    step: int
    grad_norm: float
    finished_at: float


class SavedReply(Reply, tag="saved"):
    path: str
    content_hash: str
    step: int


class PublishReply(Reply, tag="published"):
    """`publish_ms`: from the publish call's start in the resident to the name's move."""

    name: str
    version: str
    lora_id: str
    publish_ms: float


class VersionInfo(msgspec.Struct, kw_only=True):
    """`source`: "session NAME" or the directory it was loaded from. `created_at`: Unix time, seconds.

    `stored`: whether it is in the adapter directory, and so there after a restart; `not_stored` says why not.
    """

    version: str
    lora_id: str | None
    rank: int
    alpha: float
    source: str
    created_at: float
    stored: bool = True
    not_stored: str | None = None


class AdapterInfo(msgspec.Struct, kw_only=True):
    """`versions` newest first; `current` is None when the name is not served at present.

    `owner`: the session that publishes the name, since `owned_since` (Unix time, seconds); None: nobody does.
    `problem`: why the name is not served again after a restart.
    """

    name: str
    current: str | None
    versions: list[VersionInfo]
    owner: str | None = None
    owned_since: float | None = None
    problem: str | None = None


class AdaptersReply(Reply, tag="adapters"):
    adapters: list[AdapterInfo]


class MoveName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="move_name", tag_field="type"):
    """Resident to frontend, on the names channel: from now on adapter `name` means `lora_id`.

    `expires_at`: CLOCK_MONOTONIC in seconds, at which the resident stops waiting; a later move must not be made.
    """

    move_id: str
    name: Name
    adapter_version: str
    lora_id: str
    expires_at: float


class NameMoved(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="name_moved", tag_field="type"):
    """Frontend to resident: done, or `error` says why not."""

    move_id: str
    error: str | None = None


class ForgottenReply(Reply, tag="forgotten"):
    """`lora_id`: what the name meant at last, None if it meant nothing. The frontend takes the name away from it, if a
    publication has moved it there meanwhile."""

    lora_id: str | None


class DoneReply(Reply, tag="done"):
    pass


AnyReply = (
    ErrorReply
    | StatusReply
    | SessionReply
    | ForwardReply
    | OptimReply
    | SavedReply
    | PublishReply
    | AdaptersReply
    | ForgottenReply
    | DoneReply
)
