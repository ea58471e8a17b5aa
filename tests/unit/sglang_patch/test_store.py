"""Whose experts the store keeps, and what is said when there is no store."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from kt_runtime.errors import ConflictError, NotFoundError
from kt_runtime.sglang_patch import store


def test_only_known_families_keep_their_experts_in_the_store() -> None:
    assert store.keeps_experts_in_store(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]))
    assert store.keeps_experts_in_store(DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]))
    assert not store.keeps_experts_in_store(LlamaConfig(architectures=["LlamaForCausalLM"]))


def test_without_a_model_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_store", None)
    with pytest.raises(ConflictError, match="not open"):
        store.expert_store()


def test_experts_are_read_from_a_local_directory_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "_store", None)
    with pytest.raises(NotFoundError, match="some/hub-name"):
        store.open_store("some/hub-name")
