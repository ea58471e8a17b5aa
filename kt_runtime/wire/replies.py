"""The protocol's replies to the requests in `messages`."""

from __future__ import annotations

from typing import Literal

import msgspec

from kt_runtime.wire.settings import Settings
from kt_runtime.wire.status import (
    CacheTier,
    ExpertStreaming,
    GpuExperts,
    KeptRoutes,
    RankStatus,
    SessionInfo,
    TrainingTurns,
    UnforgottenName,
    UnstoredVersion,
)


class Reply(msgspec.Struct, kw_only=True, tag_field="type"):
    """Base of all replies. A client ignores unknown fields, which a newer server may send."""

    request_id: str


class ErrorReply(Reply, tag="error"):
    """`category`: "user" (the request was wrong or its numbers overflow: do not retry) or "server" (the server failed).

    `kind`: the name of a class in `kt_runtime.errors`; the client raises this class.
    """

    category: Literal["user", "server"]
    kind: str
    message: str


STEP_RUNNING = "running"


class StatusReply(Reply, tag="status"):
    """`fingerprint`: hash of the model's weights; empty until computed. `weights_shared_bytes`, `weights_copied_bytes`:
    training's parameters that share SGLang's memory, and that are copies.

    `expert_threads`: CPU threads that compute routed experts. `expert_node_bytes`: the experts' weights on each memory
    node. `expert_placement`: why the system refused to place the weights on their nodes; empty: it did not refuse.
    `chunked_prefill_tokens`: prompt tokens that serving computes at once, 0: no limit. `microbatch_tokens`: padded
    tokens that training sends through a layer at once.

    `step`: `STEP_RUNNING` if the native step computes the decoder stack on a CPU, else the reason why the engine's own
    modules compute it. `step_exceptions`: why the modules computed some batches although the step runs, such as
    embeddings as input; each reason once. `step_decode_batches`, `_tokens`, `_seconds`: batches of decoding requests
    that the step has computed since the start, their tokens, seconds of its calls; `head_decode_seconds`,
    `sampling_decode_seconds`: of the head, of sampling, for all such batches. 0 if the engine does not run on a CPU.

    `exact`: training computes the log-probabilities of serving to the bit, without dropout. `not_exact`: why they may
    differ; empty if `exact`.

    `gpu_experts`: hot experts on the device; None without `serve --gpu-experts`. `expert_streaming`: experts that
    stream there; None without a device, and with `serve --stream-experts off`. `kept_routes`: None without `serve
    --routing-replay`.

    `training_turns`: how training shares the time with serving.

    `cache`: the prefix cache's tiers, nearest first; empty if the engine reports none. `not_stored`: versions that
    could not be written to disk. `not_forgotten`: unloaded names whose removal could not be written to disk.
    `restoring`: names of an earlier run that are still being restored. `ranks`: with several of them; empty with one.
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
    step: str = ""
    step_exceptions: list[str] = msgspec.field(default_factory=list)
    step_decode_batches: int = 0
    step_decode_tokens: int = 0
    step_decode_seconds: float = 0.0
    head_decode_seconds: float = 0.0
    sampling_decode_seconds: float = 0.0
    exact: bool = False
    not_exact: str = ""
    gpu_experts: GpuExperts | None = None
    expert_streaming: ExpertStreaming | None = None
    kept_routes: KeptRoutes | None = None
    training_turns: TrainingTurns | None = None
    ranks: list[RankStatus] = msgspec.field(default_factory=list)


class SessionReply(Reply, tag="session"):
    info: SessionInfo


class ForwardReply(Reply, tag="forward_result"):
    """Buffer: `logprobs` float32 [N], the log-probability of each target. `loss`: a sum, as the request's loss defines.

    `metrics`: sums over the pairs of a `PreferenceLoss`, under the names with which LLaMA-Factory logs their means;
    sums over the counted tokens of a `PolicyLoss`; empty for a `CrossEntropy`. With a `routing_replay` also numbers of
    tokens, counted or not: `routes/replayed`, `routes/missed` (their routes are not kept) and `routes/moved` (of those
    whose routes are kept: the present router chooses other experts in some layer). `num_correct`: tokens with non-zero
    weight whose most probable next token is the target.
    `num_computed`: tokens computed by the layers; the shared prompt of a pair counts once.
    """

    loss: float
    num_tokens: int
    seconds: float
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    num_correct: int = 0
    num_computed: int = 0


class OptimReply(Reply, tag="optim_result"):
    """`grad_norm`: the norm before clipping. `finished_at`: Unix time, seconds, at the end of the step."""

    step: int
    grad_norm: float
    finished_at: float


class SavedReply(Reply, tag="saved"):
    path: str
    content_hash: str
    step: int


class PublishReply(Reply, tag="published"):
    """`publish_ms`: milliseconds from the start of the request in the resident to the name's move."""

    name: str
    version: str
    lora_id: str
    publish_ms: float


class VersionInfo(msgspec.Struct, kw_only=True):
    """`source`: "session NAME", or the path that the version was loaded from. `created_at`: Unix time, seconds.

    `stored`: the version is in the adapter directory and so survives a restart; `not_stored`: why not.
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
    """`versions`: newest first. `current`: None if the name is not served now.

    `owner`: the session that publishes the name, since `owned_since` (Unix time, seconds); None: no session does.
    `problem`: why the name could not be restored after a restart.
    """

    name: str
    current: str | None
    versions: list[VersionInfo]
    owner: str | None = None
    owned_since: float | None = None
    problem: str | None = None


class AdaptersReply(Reply, tag="adapters"):
    adapters: list[AdapterInfo]


class ForgottenReply(Reply, tag="forgotten"):
    """`lora_id`: the name's last meaning, None if it had none. If a publication has moved the name to this id in the
    meantime, the frontend removes the name again."""

    lora_id: str | None


class SettingsReply(Reply, tag="settings"):
    settings: Settings


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
    | SettingsReply
    | DoneReply
)
