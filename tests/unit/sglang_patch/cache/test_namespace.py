"""What pages depend on besides tokens and adapter, of a model that SGLang has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.errors import ConflictError
from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.resident.fingerprint import hash_weights
from kt_runtime.resident.twin.model import dense_views
from kt_runtime.sglang_patch.cache import namespace as cache_namespace
from kt_runtime.sglang_patch.cache.namespace import namespace
from kt_runtime.sglang_patch.store import expert_store, model_config


class Pool:
    dtype, layout, storage_format_tag = torch.float32, "page_first_direct", None


class OtherPool(Pool):
    pass


@pytest.fixture
def runner(served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the hook after `ModelRunner.initialize` gets."""
    monkeypatch.setattr(cache_namespace, "_runner", None)
    monkeypatch.setattr(cache_namespace, "_fingerprint", None)
    yield SimpleNamespace(
        model=served.model,
        model_config=model_config(),
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        device="cpu",
    )
    if cache_namespace._fingerprint is not None:
        cache_namespace._fingerprint.close()


def with_disk(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    settings = ResidentSettings(
        model="m",
        model_directory="d",
        wire_address="w",
        names_address="n",
        adapter_directory="a",
        cache_directory="c",
        cache_disk_bytes=size,
    )
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, settings.to_environment()[ENVIRONMENT_VARIABLE])


def test_without_a_model_there_is_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_namespace, "_runner", None)
    with pytest.raises(ConflictError, match="no model has been loaded"):
        namespace(Pool(), 8)


def test_the_hash_is_begun_with_the_model_for_a_disk_tier_only(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_disk(monkeypatch, 0)
    cache_namespace._loaded(None, runner)
    assert cache_namespace._fingerprint is None
    with_disk(monkeypatch, 1)
    cache_namespace._loaded(None, runner)
    assert cache_namespace._fingerprint is not None


def test_the_weights_are_the_residents_and_hashed_once(runner: Any, served: SimpleNamespace) -> None:
    cache_namespace._loaded(None, runner)
    found = namespace(Pool(), 8).weights
    views = dense_views(served.config, cache_namespace.named_tensors(served.model))
    assert found == hash_weights(views, expert_store())
    assert cache_namespace.fingerprint(runner).future().result() == found
    assert cache_namespace.fingerprint(runner) is cache_namespace.fingerprint(runner)


def test_whatever_changes_pages_changes_the_namespace(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_namespace._loaded(None, runner)
    plain = namespace(Pool(), 8).digest()
    assert namespace(Pool(), 8).digest() == plain
    found = {plain, namespace(Pool(), 16).digest(), namespace(OtherPool(), 8).digest()}
    for name, value in (("dtype", torch.bfloat16), ("layout", "layer_first"), ("storage_format_tag", "x")):
        pool = Pool()
        setattr(pool, name, value)
        found.add(namespace(pool, 8).digest())
    for name in ("kv_cache_dtype", "dtype"):
        with monkeypatch.context() as patch:
            patch.setattr(runner, name, torch.bfloat16)
            found.add(namespace(Pool(), 8).digest())
    with monkeypatch.context() as patch:
        patch.setattr(expert_store(), "isa", "another")
        found.add(namespace(Pool(), 8).digest())
    config = runner.model_config.hf_config
    with monkeypatch.context() as patch:
        patch.setattr(config, "rope_theta", 1.0, raising=False)
        found.add(namespace(Pool(), 8).digest())
    assert len(found) == 10


def test_where_the_model_lies_does_not_matter(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_namespace._loaded(None, runner)
    before = namespace(Pool(), 8)
    monkeypatch.setattr(runner.model_config.hf_config, "_name_or_path", "/elsewhere")
    assert namespace(Pool(), 8) == before
