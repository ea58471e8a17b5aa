"""Installs adapters from memory in SGLang's LoRA manager, and drops them, between two batches of the scheduler.

Symbols (SGLang 0.5.23): `LoRAManager._load_lora_adapter` is replaced for the families that kt-runtime knows, so that
kt-runtime's validator checks every PEFT directory, on every way to load it. Reason: SGLang mis-scales rsLoRA and PEFT's
patterns, drops unknown keys with a warning, and would not receive routed experts from kt-runtime's weight reader. The
host calls `install_prepared` and `drop_adapter`. They read and write `LoRAManager.loras`, `.configs`, `.lora_refs`,
`.num_pinned_loras` and `LoRAMemoryPool.uid_to_buffer_id`, `.buffer_id_to_uid`, `.eviction_policy`.

Everything here runs in the scheduler's thread, except `prepare_adapter`, which takes long. A loaded
id never changes its adapter. KV is keyed by the adapter's content: this module registers each id's content hash with
`cache/keys.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kt_runtime.adapters import AdapterTensors, as_version, content_hash, read_peft_directory
from kt_runtime.errors import AdapterError, ConflictError, KtError, UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.mapped import free_elsewhere
from kt_runtime.resident.memory import check_available
from kt_runtime.sglang_patch.cache import keys as cache_keys
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora import staging
from kt_runtime.sglang_patch.lora.adapter import POOL_NAMES, InstalledAdapter, build_adapter
from kt_runtime.sglang_patch.lora.rank_part import part_of
from kt_runtime.sglang_patch.lora.slots import ReservedSlot
from kt_runtime.sglang_patch.ranks import group

logger = logging.getLogger(__name__)

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
SYMBOLS = (
    f"{MANAGER}._load_lora_adapter",
    "sglang.srt.lora.lora.LoRAAdapter",
    f"{MANAGER}.loras",
    f"{MANAGER}.configs",
    f"{MANAGER}.lora_refs",
    f"{MANAGER}.num_pinned_loras",
    "sglang.srt.lora.lora_config.LoRAConfig.from_dict",
    "sglang.srt.lora.lora_registry.LoRARef",
    "sglang.srt.lora.mem_pool.EMPTY_SLOT",
    "sglang.srt.lora.mem_pool.LoRAMemoryPool.uid_to_buffer_id",
    "sglang.srt.lora.mem_pool.LoRAMemoryPool.buffer_id_to_uid",
    "sglang.srt.lora.mem_pool.LoRAMemoryPool.eviction_policy",
    "sglang.srt.runtime_context.get_lora",
)


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], load_directory)


@dataclass(frozen=True)
class PreparedAdapter:
    """The argument of `install_prepared`. `peft_config`: for SGLang. `slot`: holds a copy, unless it was given back."""

    adapter: InstalledAdapter
    peft_config: dict[str, Any]
    slot: ReservedSlot | None = None


def prepare_adapter(
    manager: Any,
    config: Mapping[str, Any],
    name: str,
    adapter: AdapterTensors,
    slot: ReservedSlot | None = None,
) -> PreparedAdapter:
    """`adapter` in the pool's dtype (`build_adapter`), and a copy of it in `slot`.

    `config`: the model's config.json. Changes nothing else and may run outside the scheduler's thread. Raises
    ConflictError if memory does not suffice, AdapterError or UnknownNameError if the server can't hold the adapter.
    """
    _check_memory(manager, name, adapter)
    modules = family_for(config).lora_modules(config)
    built = build_adapter("", adapter, modules, manager.dtype)
    if (exchange := group.exchange()) is not None:
        built = part_of(built, modules, exchange.share)
    _check_fits(manager, name, built)
    if slot is not None:
        slot.fill(built)
    return PreparedAdapter(built, _peft_config(adapter), slot)


def install_adapter(
    manager: Any, config: Mapping[str, Any], lora_id: str, name: str, version: str, adapter: AdapterTensors
) -> InstalledAdapter:
    """Calls `prepare_adapter`, then `install_prepared`."""
    _check_id_and_room(manager, lora_id, name)
    return install_prepared(manager, lora_id, name, version, prepare_adapter(manager, config, name, adapter))


def install_prepared(
    manager: Any, lora_id: str, name: str, version: str, prepared: PreparedAdapter
) -> InstalledAdapter:
    """Makes the result of `prepare_adapter` servable under `lora_id`, without a copy.

    `version`: hash of the adapter's content. `name` is for messages: several versions of one name may be installed.
    Without a filled slot, the copy into the pool's memory happens in the first batch that uses it. Raises ConflictError
    when `lora_id` is taken or `--max-loaded-loras` are loaded; then nothing has changed.
    """
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.lora.lora_registry import LoRARef

    _check_id_and_room(manager, lora_id, name)
    installed = replace(prepared.adapter, uid=lora_id)
    # SGLang requires unique names among the loaded adapters. The frontend maps a user's name to an id.
    reference = LoRARef(lora_id=lora_id, lora_name=f"{name}#{lora_id}", lora_path="", pinned=False)
    manager.configs[lora_id] = LoRAConfig.from_dict(prepared.peft_config)
    manager.loras[lora_id] = installed
    manager.lora_refs[lora_id] = reference
    cache_keys.register(lora_id, version)
    if prepared.slot is not None:
        prepared.slot.use(manager, lora_id)
    logger.info("installed adapter %s as %s: rank %d, %d bytes", name, lora_id, installed.config.r, installed.num_bytes)
    return installed


def drop_adapter(manager: Any, lora_id: str) -> None:
    """Removes the adapter and frees its slot. Ignores an unknown id.

    No request may use the adapter, because SGLang would fail (see `adapters_in_use`). The slot is not cleared: nothing
    reads a slot without an adapter.
    """
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    pool, being_staged = manager.memory_pool, staging.of(manager)
    if being_staged is not None:
        being_staged.forget(lora_id)
    slot = pool.uid_to_buffer_id.pop(lora_id, None)
    if slot is not None:
        pool.buffer_id_to_uid[slot] = EMPTY_SLOT
        pool.eviction_policy.remove(lora_id)
        if being_staged is not None:
            being_staged.dropped(slot)
    cache_keys.forget(lora_id)
    manager.configs.pop(lora_id, None)
    free_elsewhere(manager.loras.pop(lora_id, None))
    reference = manager.lora_refs.pop(lora_id, None)
    if reference is not None:
        manager.num_pinned_loras -= int(bool(reference.pinned))


def adapters_in_use(scheduler: Any) -> set[str]:
    """LoRA ids of the scheduler's waiting and running requests."""
    requests = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue, *scheduler.collect_inflight_reqs()]
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    return {request.lora_id for request in requests if request.lora_id is not None and not request.finished()}


def load_directory(original: Callable[..., Any], manager: Any, lora_ref: Any) -> Any:
    """Replaces `LoRAManager._load_lora_adapter`: loads the PEFT directory `lora_ref.lora_path` as `lora_ref.lora_id`.

    Other model families use SGLang's own method. A KtError becomes an unsuccessful result.
    """
    config = manager.base_hf_config.to_dict()
    try:
        family = family_for(config)
    except UnknownNameError:
        return original(manager, lora_ref)
    try:
        _check_name(manager, lora_ref)
        highest = getattr(manager, "max_lora_rank", None) or MAX_RANK_AT_START
        adapter = as_version(read_peft_directory(lora_ref.lora_path, family, config, highest), family, config)
        install_adapter(manager, config, lora_ref.lora_id, lora_ref.lora_name, content_hash(adapter), adapter)
    except KtError as error:
        return manager.create_lora_update_result(success=False, error_message=str(error))
    manager.lora_refs[lora_ref.lora_id] = lora_ref
    manager.num_pinned_loras += int(bool(lora_ref.pinned))
    return manager.create_lora_update_result(success=True)


MAX_RANK_AT_START = 512
"""For `--lora-paths` without `--max-lora-rank`: SGLang then uses the highest rank among the adapters."""


def _check_name(manager: Any, lora_ref: Any) -> None:
    if any(known.lora_name == lora_ref.lora_name for known in manager.lora_refs.values()):
        raise ConflictError(f"adapter {lora_ref.lora_name!r} is already loaded")
    if lora_ref.pinned and manager.num_pinned_loras >= manager.max_loras_per_batch - 1:
        raise ConflictError(
            f"adapter {lora_ref.lora_name!r} can't be pinned: {manager.num_pinned_loras} of "
            f"{manager.max_loras_per_batch} slots are pinned, and one must stay free; raise --lora-slots"
        )


def _check_id_and_room(manager: Any, lora_id: str, name: str) -> None:
    from sglang.srt.runtime_context import get_lora

    if lora_id in manager.loras:
        raise ConflictError(f"adapter {name!r}: the LoRA id {lora_id!r} is already in use")
    limit = get_lora().max_loaded_loras
    if limit is not None and len(manager.loras) >= limit:
        raise ConflictError(
            f"adapter {name!r}: {len(manager.loras)} adapters are loaded, --max-loaded-loras allows {limit}; "
            f"unload one of: {_loaded(manager)}"
        )


def _check_memory(manager: Any, name: str, adapter: AdapterTensors) -> None:
    elements = sum(pair.a.numel() + pair.b.numel() for pair in adapter.modules.values())
    check_available(elements * manager.dtype.itemsize, f"adapter {name!r}", f"; unload one of: {_loaded(manager)}")


def _loaded(manager: Any) -> str:
    return ", ".join(sorted(reference.lora_name for reference in list(manager.lora_refs.values()))) or "none"


def _check_fits(manager: Any, name: str, installed: InstalledAdapter) -> None:
    pool = getattr(manager, "memory_pool", None)
    if pool is None:  # SGLang is starting and sizes the pool later, for the adapters of --lora-paths
        return
    if installed.config.r > pool.max_lora_rank:
        raise AdapterError(
            f"adapter {name!r}: rank {installed.config.r} is above the server's --max-lora-rank {pool.max_lora_rank}"
        )
    for key, layer in installed.weights:
        if key not in pool.A_buffer:
            raise AdapterError(
                f"adapter {name!r} changes {_target(key)} in layer {layer}, which is not among the modules "
                f"that the server adapts: {', '.join(sorted(pool.target_modules))}"
            )


def _peft_config(adapter: AdapterTensors) -> dict[str, Any]:
    """The fields of a PEFT config that SGLang reads."""
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
    }


def _target(key: str) -> str:
    return "routed experts" if key in POOL_NAMES.values() else key
