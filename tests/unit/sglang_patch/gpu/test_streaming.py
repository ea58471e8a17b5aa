"""Streamed experts in SGLang's process: when they are attached, when they are paused, and what the status says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import moe
from reference.expert_problems import build_layer

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts import ExpertStore
from kt_runtime.experts.gpu import threshold
from kt_runtime.experts.gpu.paths import DevicePaths
from kt_runtime.experts.gpu.sizes import ring_bytes
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.gpu import streaming

CPU = torch.device("cpu")
TOP_K = 2


@pytest.fixture
def store() -> Iterator[ExpertStore]:
    layers = {index: build_layer(moe.random_experts(6, 32, 16, seed=index)) for index in (1, 2)}
    yield ExpertStore(layers, layers[1].shape, "portable", 2)
    streaming.detach()


def settings_with(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    names = ("model", "model_directory", "wire_address", "names_address", "adapter_directory")
    required: dict[str, Any] = dict.fromkeys(names, "x")
    for name, value in ResidentSettings(**required, **values).to_environment().items():
        monkeypatch.setenv(name, value)


def test_outside_of_a_server_and_when_off_nothing_is_attached(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming.attach(store, torch.bfloat16, TOP_K, CPU)
    settings_with(monkeypatch, stream_experts="off")
    streaming.attach(store, torch.bfloat16, TOP_K, CPU)
    assert streaming.status() is None and store.layers[1].device_paths is None


def test_without_a_device_auto_does_nothing_and_a_number_is_refused(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_runtime.device.accelerator", lambda: None)
    settings_with(monkeypatch)
    streaming.attach(store, torch.bfloat16, TOP_K)
    assert streaming.status() is None and store.layers[1].device_paths is None
    settings_with(monkeypatch, stream_experts=64)
    with pytest.raises(ConflictError, match="--stream-experts 64: this process has no device"):
        streaming.attach(store, torch.bfloat16, TOP_K)
    assert store.layers[1].device_paths is None


def test_hooks_are_for_processes_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[str] = []
    hooks: Any = SimpleNamespace(around=lambda target, _: hooked.append(target))
    streaming.install(hooks)
    settings_with(monkeypatch)
    monkeypatch.setattr("kt_runtime.device.accelerator", lambda: None)
    streaming.install(hooks)
    assert not hooked
    monkeypatch.setattr("kt_runtime.device.accelerator", lambda: torch.device("meta"))
    streaming.install(hooks)
    assert hooked == [streaming.SYMBOLS[0]]
    settings_with(monkeypatch, stream_experts="off")
    streaming.install(hooks)
    assert hooked == [streaming.SYMBOLS[0]]


def test_auto_measures_once_and_all_layers_share_the_ring(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[Any, ...]] = []

    def measure(*arguments: Any) -> threshold.Crossover:
        measured.append(arguments)
        return threshold.Crossover(96, (threshold.Timed(128, 0.1, 0.2),))

    monkeypatch.setattr(threshold, "measured", measure)
    settings_with(monkeypatch)
    for _ in range(2):  # once for each layer of SGLang's model
        streaming.attach(store, torch.bfloat16, TOP_K, CPU)
    assert len(measured) == 1 and measured[0][1:] == (store.layers[1], TOP_K, torch.bfloat16, streaming.MOST_TOKENS)
    first, second = (store.layers[index].device_paths for index in (1, 2))
    assert first is not None and second is not None
    assert first.ring is second.ring and first.rule is second.rule
    assert first.counts is not None and second.counts is None
    assert [first.streams(tokens) for tokens in (95, 96)] == [False, True]
    first.counts.forward, first.counts.backward = 300, 100
    status = streaming.status()
    assert status is not None
    assert (status.threshold_tokens, status.measured, status.forward_tokens, status.backward_tokens) == (
        *(96, True),
        *(300, 100),
    )
    assert (status.chunk_experts, status.ring_bytes) == (6, ring_bytes(store.shape, 6))


def test_a_number_is_taken_without_measuring(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "measured", None)
    settings_with(monkeypatch, stream_experts=7)
    store.layers[1].device_paths = DevicePaths(hot=None)
    streaming.attach(store, torch.bfloat16, TOP_K, CPU)
    status = streaming.status()
    assert status is not None and (status.threshold_tokens, status.measured) == (7, False)


def test_a_machine_where_the_cpu_is_faster_streams_nothing(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "measured", lambda *_: threshold.Crossover(None, ()))
    settings_with(monkeypatch)
    streaming.attach(store, torch.bfloat16, TOP_K, CPU)
    paths, status = store.layers[1].device_paths, streaming.status()
    assert paths is not None and not paths.streams(1 << 20)
    assert status is not None and status.threshold_tokens is None


def test_a_batch_that_decodes_does_not_stream(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_with(monkeypatch, stream_experts=7)

    def forward(runner: str, forward_batch: Any, keyword: int) -> tuple[str, int, bool | None]:
        paths = store.layers[1].device_paths
        return runner, keyword, None if paths is None else paths.streams(8)

    def batch(decodes: bool) -> Any:
        return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decodes))

    assert streaming.step(forward, "runner", batch(False), keyword=3) == ("runner", 3, None)
    streaming.attach(store, torch.bfloat16, TOP_K, CPU)
    assert streaming.step(forward, "runner", batch(False), keyword=3) == ("runner", 3, True)
    assert streaming.step(forward, "runner", batch(True), keyword=3) == ("runner", 3, False)
    with pytest.raises(ZeroDivisionError):
        streaming.step(lambda *_: 1 / 0, "runner", batch(True))
    assert streaming.step(forward, "runner", batch(False), keyword=3) == ("runner", 3, True)


def test_without_memory_for_a_ring_auto_leaves_the_experts_and_a_number_is_refused(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    least = ring_bytes(store.shape, 1)
    free = SimpleNamespace(free_bytes=streaming.LARGEST_SHARE_OF_FREE_MEMORY * least - 1)
    monkeypatch.setattr("kt_runtime.device.memory", lambda _: free)
    monkeypatch.setattr("kt_runtime.device.is_host", lambda _: False)
    monkeypatch.setattr("kt_runtime.device.accelerator", lambda: CPU)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    settings_with(monkeypatch)
    streaming.attach(store, torch.bfloat16, TOP_K)
    assert streaming.status() is None
    assert f"a ring of experts takes {least} bytes at least, and {least - 1} of the device may be used" in caplog.text
    settings_with(monkeypatch, stream_experts=7)
    with pytest.raises(InvalidValueError, match=f"--stream-experts 7: a ring of experts takes {least} bytes"):
        streaming.attach(store, torch.bfloat16, TOP_K)
