"""`kt-runtime serve --routing-replay`: what of it is known before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.plan import format_bytes
from kt_runtime.serve.options.named import ServeOptions


def check_routing_replay(options: ServeOptions, config: Mapping[str, Any], *, with_gpu: bool) -> None:
    """Raises InvalidValueError on a machine with a GPU, and for a size that has no room for a sequence of the context.

    `config`: the model's config.json. `with_gpu`: attention and dense layers are on a GPU.
    """
    size_bytes = options.routing_replay_bytes
    if not size_bytes:
        return
    if with_gpu:
        raise InvalidValueError(
            f"--routing-replay {format_bytes(size_bytes)}: routes are kept by a server on a CPU only; leave it out, or "
            "serve with --device cpu"
        )
    from kt_runtime.resident.routes.store import RouteStore

    family = family_for(config)
    layers, num_experts = len(family.moe_layers(config)), family.expert_shape(config)[0]
    token_bytes = RouteStore.bytes_of_token(layers, family.num_experts_per_tok(config), num_experts)
    tokens = min(options.max_total_tokens, options.context_tokens or options.max_total_tokens)
    if size_bytes < tokens * token_bytes:
        raise InvalidValueError(
            f"--routing-replay {format_bytes(size_bytes)}: a token takes {token_bytes} bytes, and a sequence may have "
            f"{tokens} tokens; give at least {format_bytes(tokens * token_bytes)}"
        )
