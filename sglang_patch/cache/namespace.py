"""Everything that pages of KV depend on besides their tokens and the adapter, for tiers that outlive this process.

Symbol (SGLang 0.5.23): after `ModelRunner.initialize` the weights are loaded. With a disk tier, hashing them starts at
this point and runs while SGLang allocates its pools. The other symbols are only read.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kt_runtime import __version__
from kt_runtime.cache.format import Namespace
from kt_runtime.errors import ConflictError
from kt_runtime.experts.store import Each
from kt_runtime.families import family_for
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.fingerprint import WeightsFingerprint, hash_weights
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.sglang_patch.version import PINNED

SYMBOLS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.initialize",
    "sglang.srt.model_executor.model_runner.ModelRunner.kv_cache_dtype",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.runtime_context.get_lora",
    "sglang.srt.runtime_context.get_parallel",
)
NO_CONTENT = ("_name_or_path", "_commit_hash", "transformers_version")
"""Keys of a model's configuration that don't change the computation."""

_runner: Any = None  # the runner of the process's only model
_fingerprint: WeightsFingerprint | None = None


def install(hooks: Hooks) -> None:
    if ResidentSettings.from_environment() is not None:
        hooks.after(SYMBOLS[0], _loaded)


def namespace(pool: Any, page_tokens: int) -> Namespace:
    """Namespace of the pages in the host pool `pool`. Waits for the fingerprint, which reads all weights once.

    Raises ConflictError before the model has been loaded, or the error of a failed fingerprint.
    """
    if _runner is None:
        raise ConflictError("the prefix cache's namespace: no model has been loaded")
    parallel = _parallel()
    return Namespace(
        weights=fingerprint(_runner).future().result(),
        configuration=_hashed(_configuration(_runner)),
        kv_dtype=f"{_runner.kv_cache_dtype} as {pool.dtype}",
        page_tokens=page_tokens,
        layout=f"{type(pool).__name__}/{pool.layout}/{pool.storage_format_tag or 'plain'}",
        shard=f"{parallel.tp_rank}/{parallel.tp_size}",
    )


def fingerprint(runner: Any) -> WeightsFingerprint:
    """Fingerprint of the weights of `runner`'s model, the only one in the process. Resident and cache share it."""
    global _fingerprint
    if _fingerprint is None:
        from kt_runtime.resident.twin.model import dense_views

        config = runner.model_config.hf_config.to_dict()
        family_for(config)  # raises for an unknown family here, not in the thread that waits
        tensors = named_tensors(runner.model)
        is_whole = group.num_ranks() == 1  # a rank hashes its own parts, which are no views of whole weights

        def compute(each: Each) -> str:
            dense = dense_views(config, tensors) if is_whole else tensors
            return hash_weights(dense, expert_store(), each)

        _fingerprint = WeightsFingerprint(compute)
    return _fingerprint


def named_tensors(model: Any) -> dict[str, Any]:
    """Parameters and buffers by the engine's names."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _loaded(result: Any, runner: Any) -> None:
    global _runner
    _runner = runner
    settings = ResidentSettings.from_environment()
    if settings is not None and settings.cache_disk_bytes:
        fingerprint(runner).future()


def _configuration(runner: Any) -> dict[str, Any]:
    """Everything but the weights that changes KV. Kernels of different instruction sets round differently."""
    from sglang.srt.runtime_context import get_exec, get_lora

    kernel, config = get_exec().kernel, runner.model_config.hf_config.to_dict()
    return {
        "engine": PINNED,
        "runtime": __version__,  # attention, norms and experts are kt-runtime's, and a release may change them
        "model": {key: value for key, value in config.items() if key not in NO_CONTENT},
        "dtype": str(runner.dtype),
        "device": str(runner.device),
        "attention": [kernel.attention_backend, kernel.prefill_attention_backend, kernel.decode_attention_backend],
        "lora": get_lora().lora_backend,
        "experts": expert_store().isa,
    }


def _hashed(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
