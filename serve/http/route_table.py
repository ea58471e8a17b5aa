"""Every route of SGLang and kt-runtime: who may call it, and how its body is bounded.

    access     without a key, this machine's   without a key, others'   with a key
    PROBE      answered                        403                      answered
    READ       answered                        403                      key
    GENERATE   answered                        403                      key
    GUARDED    answered                        403                      key
    REFUSED    403                             403                      key, then 403

"This machine's" and "others'" refer to the request's `Host` and `Origin`, as `origins.py` judges them. On a server that
listens beyond loopback without a key (`--allow-no-key`), every request to a GUARDED route is denied.

A route that is missing from the table answers 404: a route added by a later SGLang stays closed until it is reviewed.
For a rule with a `body`, `requests/checks/middleware.py` validates the body against that struct before SGLang parses
anything, and `requests/checks/body_reader.py` bounds its size; every other body may have 64 KiB.
`tests/unit/serve/test_route_table.py` walks SGLang's route table and the fields of its request models.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from kt_runtime.serve.requests.bodies import chat, completions, control, generate, messages, responses, scoring
from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.checks.body_reader import SMALL_BODY_BYTES

FIXED_WEIGHTS = "the base model is being trained on in place; its weights never change while the server runs"
FIXED_PROCESSES = "the processes of a server are fixed at its start; start another server instead"
NO_EMBEDDINGS = "the models that kt-runtime serves generate text; embeddings and classes need another kind of model"
NO_AUDIO = "the models that kt-runtime serves read text only"
TRAINING_BODY_BYTES = 32 * 1024 * 1024
"""The largest body of a Tinker client's training call or prompt, also decompressed: a sequence of a million tokens with
its inputs, so that a too long one is answered with its length."""
FILE_BYTES = 128 * 1024 * 1024
"""The largest file of the fine-tuning API: about thirty million tokens, an epoch of many hours."""
NO_EXPERT_RECORD = "routed experts are run by kt-runtime's expert store, which SGLang's recorder does not see"


class Access(enum.Enum):
    PROBE = "probe"
    READ = "read"
    GENERATE = "generate"
    GUARDED = "guarded"
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """`path` may hold `{x}`, one segment, or `{x:path}`, the rest. `methods` None: all. `reason` is for REFUSED.

    `body`: the fields that the body may have. None: the route reads no body, or is kt-runtime's and checks its own.
    `query`: the same for the query string. `max_bytes`: of a body that the route checks itself. `takes_zstd`: the body
    may be compressed. `streams`: the route reads a body of up to `max_bytes` as it arrives. `takes_ends`: of a larger
    body the route gets the beginning and the end (`requests/checks/middleware.TooLarge`).
    """

    access: Access
    path: str
    methods: frozenset[str] | None = None
    reason: str = ""
    body: type[Body] | None = None
    query: type[Body] | None = None
    max_bytes: int = SMALL_BODY_BYTES
    takes_zstd: bool = False
    streams: bool = False
    takes_ends: bool = False


def _rules(access: Access, paths: str, methods: str = "", reason: str = "", **fields: Any) -> list[Rule]:
    return [Rule(access, path, frozenset(methods.split()) or None, reason, **fields) for path in paths.split()]


def _asking(body: type[Body], paths: str, methods: str = "POST") -> list[Rule]:
    return _rules(Access.GENERATE, paths, methods, body=body)


def _changing(body: type[Body], paths: str, methods: str = "POST") -> list[Rule]:
    return _rules(Access.GUARDED, paths, methods, body=body)


def _tinker(access: Access, paths: str, methods: str, **fields: Any) -> list[Rule]:
    """Routes of the Tinker API. They check their bodies themselves (`serve/tinker/protocol`)."""
    return _rules(access, " ".join(f"/api/v1/{path}" for path in paths.split()), methods, **fields)


def _refused(reason: str, paths: str, methods: str = "") -> list[Rule]:
    return _rules(Access.REFUSED, paths, methods, reason)


RULES: tuple[Rule, ...] = (
    *_rules(Access.PROBE, "/health /ready /ping", "GET HEAD"),
    *_rules(Access.READ, "/ /openapi.json /docs /docs/oauth2-redirect /redoc /metrics /metrics/", "GET HEAD"),
    *_rules(Access.READ, "/health_generate /get_model_info /model_info /get_server_info /server_info", "GET"),
    *_rules(Access.READ, "/get_hicache_l3_cache_layout /hicache/storage-backend", "GET"),
    *_rules(Access.READ, "/v1/models /v1/models/{model:path} /is_scaling_elastic_ep", "GET"),
    *_rules(Access.READ, "/v1/loads", "GET", query=control.LoadsQuery),
    *_rules(Access.READ, "/kt/status /kt/settings /kt/registry /kt/adapters /kt/adapters/{name}", "GET"),
    *_asking(generate.Generate, "/generate", "POST PUT"),
    *_asking(generate.VertexGenerate, "/vertex_generate"),
    *_asking(completions.TextCompletion, "/v1/completions"),
    *_asking(chat.ChatCompletion, "/v1/chat/completions /invocations"),
    *_asking(responses.Responses, "/v1/responses"),
    *_asking(messages.AnthropicMessages, "/v1/messages"),
    *_asking(messages.CountTokens, "/v1/messages/count_tokens"),
    *_asking(completions.Tokenize, "/tokenize /v1/tokenize"),
    *_asking(completions.Detokenize, "/detokenize /v1/detokenize"),
    *_asking(scoring.Score, "/v1/score"),
    *_asking(scoring.Decisions, "/v1/decisions"),
    *_asking(scoring.FunctionCallText, "/parse_function_call"),
    *_asking(scoring.ReasoningText, "/separate_reasoning"),
    *_rules(Access.GUARDED, "/kt/adapters /kt/adapters/{name}/rollback /kt/cache/clear", "POST"),
    *_rules(Access.GUARDED, "/kt/settings", "PATCH"),
    *_rules(Access.GUARDED, "/kt/adapters/{name}", "DELETE"),
    *_rules(Access.GUARDED, "/flush_cache", "GET POST", query=control.FlushQuery),
    *_rules(Access.GUARDED, "/freeze_gc", "GET POST"),
    *_changing(control.LoadAdapter, "/load_lora_adapter"),
    *_changing(control.UnloadAdapter, "/unload_lora_adapter"),
    *_changing(control.AbortRequest, "/abort_request"),
    *_changing(control.PauseGeneration, "/pause_generation"),
    *_changing(control.ContinueGeneration, "/continue_generation"),
    *_changing(control.OpenSession, "/open_session", "GET POST"),
    *_changing(control.CloseSession, "/close_session", "GET POST"),
    *_tinker(Access.READ, "healthz get_server_capabilities training_runs training_runs/{run} checkpoints", "GET"),
    *_tinker(Access.READ, "training_runs/{run}/checkpoints samplers/{sampler}", "GET"),
    *_tinker(Access.READ, "client/config client/dynamic_config weights_info", "POST"),
    *_tinker(Access.GUARDED, "telemetry", "POST", max_bytes=TRAINING_BODY_BYTES),
    *_tinker(Access.GUARDED, "create_session session_heartbeat sessions/{session}/finish", "POST"),
    *_tinker(Access.GUARDED, "create_model get_info unload_model optim_step load_weights retrieve_future", "POST"),
    *_tinker(Access.GUARDED, "save_weights save_weights_external save_weights_for_sampler", "POST"),
    *_tinker(
        Access.GUARDED,
        "forward forward_backward",
        "POST",
        max_bytes=TRAINING_BODY_BYTES,
        takes_zstd=True,
        takes_ends=True,
    ),
    *_tinker(Access.GUARDED, "create_sampling_session", "POST"),
    *_tinker(Access.GUARDED, "asample", "POST", max_bytes=TRAINING_BODY_BYTES),
    *_tinker(Access.GUARDED, "training_runs/{run}/checkpoints/{checkpoint:path}", "DELETE"),
    *_rules(Access.GUARDED, "/v1/files", "POST", max_bytes=FILE_BYTES + SMALL_BODY_BYTES, streams=True),
    *_rules(Access.GUARDED, "/v1/files /v1/files/{file} /v1/files/{file}/content", "GET"),
    *_rules(Access.GUARDED, "/v1/files/{file}", "DELETE"),
    *_rules(Access.GUARDED, "/v1/fine_tuning/jobs /v1/fine_tuning/jobs/{job}/cancel", "POST"),
    *_rules(Access.READ, "/v1/fine_tuning/jobs /v1/fine_tuning/jobs/{job}", "GET"),
    *_rules(Access.READ, "/v1/fine_tuning/jobs/{job}/events /v1/fine_tuning/jobs/{job}/checkpoints", "GET"),
    *_refused(
        "a job runs until it ends; cancel it",
        "/v1/fine_tuning/jobs/{job}/pause /v1/fine_tuning/jobs/{job}/resume",
        "POST",
    ),
    *_refused(
        FIXED_WEIGHTS,
        "/update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed "
        "/update_weights_from_ipc /begin_weight_update /end_weight_update /update_weight_version "
        "/init_weights_update_group /destroy_weights_update_group /weights_checker "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance "
        "/release_memory_occupation /resume_memory_occupation",
    ),
    *_refused("the weights are in the model's checkpoint; read them there", "/get_weights_by_name"),
    *_refused(
        "it takes pickled tensors; save the adapter as a PEFT directory and POST its path to /kt/adapters",
        "/load_lora_adapter_from_tensors",
    ),
    *_refused(
        FIXED_PROCESSES,
        "/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info /pd_role_switch "
        "/scale_elastic_ep",
    ),
    *_refused(NO_EMBEDDINGS, "/encode /classify /v1/embeddings /v1/classify /v1/rerank"),
    *_refused(NO_AUDIO, "/v1/audio/transcriptions /v1/realtime"),
    *_refused(
        "SGLang's version of it ignores the model's name and adapters; use /v1/chat/completions",
        "/api/chat /api/generate /api/tags /api/show",
    ),
    *_refused("SGLang's version of it is not offered; use /v1/decisions", "/v1/systemone"),
    *_refused(
        "answers are not kept on the server; send the conversation as `input` of POST /v1/responses",
        "/v1/responses/{response_id} /v1/responses/{response_id}/cancel",
    ),
    *_refused(
        "SGLang's profiler writes files to any path, and ends the scheduler on a CPU; use py-spy or perf",
        "/start_profile /stop_profile",
    ),
    *_refused(
        NO_EXPERT_RECORD,
        "/start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record",
    ),
    *_refused("it writes requests as pickles to any path", "/configure_logging"),
    *_refused("it delays every batch, and training with it", "/slow_down"),
    *_refused("tracing is not set up", "/set_trace_level"),
    *_refused(
        "it is for speculative decoding, which kt-runtime does not run",
        "/add_external_corpus /remove_external_corpus /list_external_corpora",
    ),
    *_refused("the server's settings are fixed when it starts", "/set_internal_state"),
    *_refused("it writes tensors to the server's disk", "/dumper/{method}"),
    *_refused(
        "it loads code by name; choose the cache when the server starts", "/hicache/storage-backend", "PUT DELETE"
    ),
    *_refused(
        "pages would stay in memory and never be written again; POST /kt/cache/clear empties all tiers",
        "/hicache/storage-backend/clear",
        "POST",
    ),
)


def _compile(path: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\})", path)
    text = "".join(
        re.escape(part) if not part.startswith("{") else (".*" if part.endswith(":path}") else "[^/]+")
        for part in parts
    )
    return re.compile(text, re.DOTALL)


_COMPILED = [(_compile(rule.path), rule) for rule in RULES]


def rule_for(method: str, path: str) -> Rule | None:
    """The first matching rule, or None. A websocket's method is "WEBSOCKET"."""
    for pattern, rule in _COMPILED:
        if (rule.methods is None or method in rule.methods) and pattern.fullmatch(path):
            return rule
    return None


def methods_of(path: str) -> frozenset[str]:
    """The methods of a path in the table; empty for an unknown path."""
    return frozenset(
        method for pattern, rule in _COMPILED if pattern.fullmatch(path) for method in rule.methods or {"GET", "POST"}
    )
