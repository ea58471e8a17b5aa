"""Installing and dropping adapters in SGLang's real manager; without batches (test_lora_layers.py has those)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.adapters import AdapterTensors, LoraPair, VersionStore, as_version, content_hash
from kt_runtime.errors import AdapterError, ConflictError, UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.resident import memory
from kt_runtime.sglang_patch.cache.keys import cache_key
from kt_runtime.sglang_patch.lora.install import adapters_in_use, drop_adapter, install_adapter


@pytest.fixture
def adapter(served: SimpleNamespace, reference: ModuleType) -> AdapterTensors:
    return reference.random_adapter(served.config, rank=4, alpha=8.0, seed=0)


def state(manager: Any) -> tuple[Any, ...]:
    pool = manager.memory_pool
    return (
        sorted(manager.loras),
        sorted(manager.configs),
        sorted(manager.lora_refs),
        manager.num_pinned_loras,
        dict(pool.uid_to_buffer_id),
        list(pool.buffer_id_to_uid),
    )


def load(manager: Any, directory: Path, name: str, pinned: bool = False) -> Any:
    from sglang.srt.lora.lora_registry import LoRARef

    return manager.load_lora_adapter(
        LoRARef(lora_id=f"id-{name}", lora_name=name, lora_path=str(directory), pinned=pinned)
    )


def test_dropping_leaves_what_was_there_before(served: SimpleNamespace, manager: Any, adapter: AdapterTensors) -> None:
    before = state(manager)
    install_adapter(manager, served.config, "one", "name", "content", adapter)
    manager.fetch_new_loras({"one", None})
    assert state(manager) != before
    drop_adapter(manager, "one")
    assert state(manager) == before
    drop_adapter(manager, "one")
    assert state(manager) == before


def test_versions_of_one_name_stand_beside_each_other(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors
) -> None:
    install_adapter(manager, served.config, "one", "name", "content", adapter)
    install_adapter(manager, served.config, "two", "name", "content", adapter)
    manager.fetch_new_loras({"one", "two", None})
    assert manager.validate_lora_batch({"one", "two", None})


def test_a_freed_slot_is_used_again(served: SimpleNamespace, manager: Any, adapter: AdapterTensors) -> None:
    for round_trip in range(10):
        install_adapter(manager, served.config, f"v{round_trip}", "name", "content", adapter)
        manager.fetch_new_loras({f"v{round_trip}", None})
        drop_adapter(manager, f"v{round_trip}")
    assert len(manager.memory_pool.uid_to_buffer_id) == 1  # the base


def test_later_changes_of_tensors_of_another_dtype_are_not_served(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors
) -> None:
    """Of the server's dtype they must not change (`Host.prepare_adapter`)."""
    modules = {name: LoraPair(pair.a.double(), pair.b.double()) for name, pair in adapter.modules.items()}
    adapter = replace(adapter, modules=modules)
    install_adapter(manager, served.config, "one", "name", "content", adapter)
    kept = adapter.modules["model.layers.0.self_attn.o_proj"].a.clone()
    for pair in adapter.modules.values():
        pair.a.zero_()
    manager.fetch_new_loras({"one"})
    slot = manager.memory_pool.get_buffer_id("one")
    assert torch.equal(manager.memory_pool.A_buffer["o_proj"][0][slot, :4], kept.float())


def test_a_taken_id_is_refused(served: SimpleNamespace, manager: Any, adapter: AdapterTensors) -> None:
    install_adapter(manager, served.config, "one", "name", "content", adapter)
    before = state(manager)
    with pytest.raises(ConflictError, match="'one' is already in use"):
        install_adapter(manager, served.config, "one", "name", "content", adapter)
    assert state(manager) == before


def test_without_room_nothing_is_installed(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_lora", lambda: SimpleNamespace(max_loaded_loras=1))
    install_adapter(manager, served.config, "one", "first", "content", adapter)
    before = state(manager)
    with pytest.raises(ConflictError, match=r"max-loaded-loras allows 1; unload one of: first#one"):
        install_adapter(manager, served.config, "two", "second", "content", adapter)
    assert state(manager) == before


def test_without_memory_nothing_is_installed(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    monkeypatch.setattr(memory.spare, "leaving_bytes", lambda: 0)  # of adapters of other tests in this process
    before = state(manager)
    with pytest.raises(ConflictError, match=r"bytes of memory, 1000 are available; unload one of: none"):
        install_adapter(manager, served.config, "one", "name", "content", adapter)
    assert state(manager) == before


def test_what_the_server_cannot_hold_is_refused(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, reference: ModuleType
) -> None:
    before = state(manager)
    with pytest.raises(AdapterError, match="rank 16 is above the server's --max-lora-rank 8"):
        big = reference.random_adapter(served.config, rank=16, alpha=1.0, seed=0, only=["o_proj"])
        install_adapter(manager, served.config, "one", "name", "content", big)
    with pytest.raises(UnknownNameError, match="lm_head"):
        other = AdapterTensors.from_modules(4, 8.0, {"lm_head": LoraPair(torch.ones(4, 4), torch.ones(4, 4))})
        install_adapter(manager, served.config, "one", "name", "content", other)
    assert state(manager) == before


def test_a_peft_directory_is_loaded_by_our_reader(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, reference: ModuleType, tmp_path: Path
) -> None:
    result = load(manager, reference.write_adapter(tmp_path / "adapter", adapter), "name")
    assert result.success, result.error_message
    installed = manager.loras["id-name"]
    assert installed.adapts_experts
    assert installed.scaling == adapter.scaling
    again = load(manager, tmp_path / "adapter", "name")
    assert not again.success
    assert "already loaded" in again.error_message


def test_a_broken_directory_is_refused_and_nothing_changes(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, reference: ModuleType, tmp_path: Path
) -> None:
    directory = reference.write_adapter(tmp_path / "adapter", adapter)
    tensors = directory / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    before = state(manager)
    result = load(manager, directory, "name")
    assert not result.success
    assert "adapter_model.safetensors" in result.error_message
    assert not load(manager, tmp_path / "nowhere", "name").success
    assert state(manager) == before


def test_not_all_slots_can_be_pinned(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, reference: ModuleType, tmp_path: Path
) -> None:
    directory = reference.write_adapter(tmp_path / "adapter", adapter)
    results = [load(manager, directory, f"n{i}", pinned=True) for i in range(4)]
    assert [result.success for result in results] == [True, True, True, False]
    assert "--lora-slots" in results[3].error_message


def test_adapters_of_waiting_and_running_requests_are_in_use() -> None:
    def request(lora_id: str | None, finished: bool = False) -> SimpleNamespace:
        return SimpleNamespace(lora_id=lora_id, finished=lambda: finished)

    running = [request("running"), request("done", finished=True)]
    scheduler = SimpleNamespace(
        waiting_queue=[request("waiting"), request(None)],
        grammar_manager=SimpleNamespace(grammar_queue=[request("compiling")]),
        collect_inflight_reqs=lambda: running,
        chunked_req=request("chunked"),
    )
    assert adapters_in_use(scheduler) == {"waiting", "compiling", "running", "chunked"}


def test_an_installed_id_is_kept_under_its_content_until_it_is_dropped(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors
) -> None:
    install_adapter(manager, served.config, "one", "name", "content", adapter)
    assert cache_key("one", None) == "kt1|content|-"
    drop_adapter(manager, "one")
    assert "content" not in cache_key("one", None)


def test_a_directory_has_the_content_of_what_was_published(
    served: SimpleNamespace, manager: Any, adapter: AdapterTensors, reference: ModuleType, tmp_path: Path
) -> None:
    family = family_for(served.config)
    published = content_hash(as_version(adapter, family, served.config))
    assert load(manager, reference.write_adapter(tmp_path / "adapter", adapter), "name").success
    assert cache_key("id-name", None) == f"kt1|{published}|-"
    stored = VersionStore(tmp_path / "store", family, served.config, 8).save("x", adapter, created=0.0)
    assert load(manager, tmp_path / "store" / "x" / stored.hash, "other").success
    assert cache_key("id-other", None) == cache_key("id-name", None)
