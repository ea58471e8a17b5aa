"""Hot experts in SGLang's process, with CPU memory as the device: steps, turns, status and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from reference import moe as reference
from reference.expert_problems import build_layer

from kt_runtime.errors import ConflictError
from kt_runtime.experts import ExpertStore
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.hot.set import NUM_CARRIERS, HotSet, HotUse, LayerUse
from kt_runtime.experts.gpu.hot.slots import expert_bytes
from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.sglang_patch.gpu import hot
from kt_runtime.sglang_patch.gpu.hot_metrics import PublishedHot
from kt_runtime.sglang_patch.resident import turns

E, H, INNER = 6, 64, 32
LAYERS = (1, 2)
CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[ExpertStore]:
    layers = {index: build_layer(reference.random_experts(E, H, INNER, seed=index)) for index in LAYERS}
    made = ExpertStore(layers, layers[1].shape, "portable", 1)
    yield made
    hot.detach()
    made.close()


def settings_with(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    settings = ResidentSettings(
        model="m",
        model_directory="/m",
        wire_address="ipc:///w",
        names_address="ipc:///n",
        adapter_directory="/a",
        **values,
    )
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, settings.to_environment()[ENVIRONMENT_VARIABLE])


def attached(store: ExpertStore, monkeypatch: pytest.MonkeyPatch, **values: Any) -> HotSet:
    size = (NUM_CARRIERS + 4) * expert_bytes(store.shape, torch.bfloat16)
    settings_with(monkeypatch, gpu_expert_bytes=size, **values)
    hot.attach(store, torch.bfloat16, CPU)
    assert hot._hot is not None
    return hot._hot


class Mode:
    def __init__(self, decodes: bool) -> None:
        self._decodes = decodes

    def is_decode(self) -> bool:
        return self._decodes


def batch(num_tokens: int, *, decodes: bool) -> Any:
    return SimpleNamespace(forward_mode=Mode(decodes), input_ids=torch.zeros(num_tokens, dtype=torch.int64))


def test_without_the_option_nothing_is_hooked_or_attached(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[str] = []
    hooks: Any = SimpleNamespace(
        around=lambda target, _: hooked.append(target), after=lambda target, _: hooked.append(target)
    )
    hot.install(hooks)
    settings_with(monkeypatch)
    hot.install(hooks)
    hot.attach(store, torch.bfloat16, CPU)
    assert (hooked, hot.status(), hot.not_exact(), hot.has_work()) == ([], None, "", False)
    hot.turn()
    assert store.layers[1].device_paths is None
    settings_with(monkeypatch, gpu_expert_bytes=1)
    hot.install(hooks)
    assert hooked == list(hot.SYMBOLS[:2])


def test_a_process_without_a_device_is_refused(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_with(monkeypatch, gpu_expert_bytes=1 << 30)
    monkeypatch.setattr("kt_runtime.device.accelerator", lambda: None)
    with pytest.raises(ConflictError, match="--gpu-experts: this process has no device"):
        hot.attach(store, torch.bfloat16)


def test_a_server_starts_with_its_pinned_experts_there(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attached(store, monkeypatch, pinned_experts={1: (0, 3), 2: (5,)})
    status = hot.status()
    assert status is not None
    assert (status.resident, status.pinned, status.moves, status.slots) == ({1: [0, 3], 2: [5]}, 3, 3, 4)
    assert status.size_bytes == made.size_bytes and status.moved_bytes == 3 * status.slot_bytes
    assert (status.hit_rate, status.decode_steps) == (0, 0)
    for index in LAYERS:
        paths = store.layers[index].device_paths
        assert paths is not None and paths.hot is made.layers[index]
    assert "experts on the device round in other places" in hot.not_exact()
    hot.attach(store, torch.bfloat16, CPU)  # once for each layer of SGLang's model
    assert hot._hot is made


def test_a_batch_of_requests_may_hit_and_training_may_not(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attached(store, monkeypatch, pinned_experts={1: (0, 3)})
    layer, use = store.layers[1], made.layers[1]
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = torch.tensor([[0, 1], [3, 2], [0, 3], [5, -1]], dtype=torch.int32), torch.ones(4, 2)
    call = ExpertCall(x, ids, weights, (), None)

    def forward(runner: str, forward_batch: Any, keyword: int) -> tuple[str, int, bool]:
        if use.takes(call):
            use.forward(layer, call)
        return runner, keyword, use.takes(call)

    assert hot.step(forward, "runner", batch(4, decodes=False), keyword=3) == ("runner", 3, True)
    assert (use.uses.hits, use.uses.misses) == (0, 0)
    assert hot.step(forward, "runner", batch(3, decodes=True), keyword=3) == ("runner", 3, True)
    assert (use.uses.hits, use.uses.misses) == (4, 2)  # the fourth row is padding
    assert not use.takes(call)
    status = hot.status()
    assert status is not None
    assert (status.hits, status.misses, status.decode_steps) == (4, 2, 1)
    assert status.hit_rate == 4 / 6


def test_a_batch_that_fails_ends_its_step(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attached(store, monkeypatch)

    def fails(*_: Any) -> None:
        assert made.step_state.is_serving
        raise RuntimeError("the batch failed")

    with pytest.raises(RuntimeError, match="the batch failed"):
        hot.step(fails, "runner", batch(3, decodes=True))
    assert not made.step_state.is_serving
    hot.turn()


def test_experts_move_once_a_turn_before_training_runs(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attached(store, monkeypatch)
    order: list[str] = []
    resident = SimpleNamespace(turn=lambda: order.append("training"), has_work=lambda: False)
    monkeypatch.setattr(turns, "_resident", resident)
    monkeypatch.setattr(turns, "_metrics", SimpleNamespace(is_due=False))
    original = HotSet.turn

    def turn(self: HotSet) -> None:
        order.append("experts")
        original(self)

    monkeypatch.setattr(HotSet, "turn", turn)
    made.placement.count(1, torch.arange(E).numpy() * 50)

    def requests(scheduler: Any) -> str:
        order.append("requests")
        return "received"

    scheduler = SimpleNamespace(gracefully_exit=False)
    assert turns._turn(requests, scheduler) == "received"
    assert order == ["requests", "experts", "training"]
    assert turns.has_work()  # a copy is on its way: the scheduler does not sleep
    for _ in range(4):
        turns._turn(lambda *_: None, scheduler)
    assert not turns.has_work() and made.use().layers[0].resident == [4, 5]


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if "_created" not in name}


def test_metrics_count_by_layer() -> None:
    registry = CollectorRegistry()
    published = PublishedHot(registry)
    layers = [LayerUse(1, 2, [0, 3], 30, 10, "int4_g32", 1000), LayerUse(2, 2, [], 0, 0, "int8", 900)]
    published.publish(HotUse("published", 6000, 500, 1, 2, 2000, 9, layers))
    layers[0] = LayerUse(1, 2, [3], 60, 20, "int4_g32", 1000)
    published.publish(HotUse("published", 6000, 500, 1, 3, 3000, 18, layers))
    found = samples(registry)
    assert found == {
        "kt_runtime:gpu_experts_moves_total": 3,
        "kt_runtime:gpu_experts_moved_bytes_total": 3000,
        "kt_runtime:gpu_experts_size_bytes": 6000,
        "kt_runtime:gpu_experts_scratch_bytes": 500,
        'kt_runtime:gpu_experts_slot_bytes{format="int4_g32",layer="1"}': 1000,
        'kt_runtime:gpu_experts_slot_bytes{format="int8",layer="2"}': 900,
        'kt_runtime:gpu_experts_hits_total{layer="1"}': 60,
        'kt_runtime:gpu_experts_hits_total{layer="2"}': 0,
        'kt_runtime:gpu_experts_misses_total{layer="1"}': 20,
        'kt_runtime:gpu_experts_misses_total{layer="2"}': 0,
        'kt_runtime:gpu_experts_hit_rate{layer="1"}': 0.75,
        'kt_runtime:gpu_experts_hit_rate{layer="2"}': 0,
        'kt_runtime:gpu_experts_resident{layer="1"}': 1,
        'kt_runtime:gpu_experts_resident{layer="2"}': 0,
        'kt_runtime:gpu_experts_slots{layer="1"}': 2,
        'kt_runtime:gpu_experts_slots{layer="2"}': 2,
    }


def test_metrics_are_published_at_most_once_a_second(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    attached(store, monkeypatch)
    published: list[HotUse] = []
    monkeypatch.setattr(hot, "PublishedHot", lambda: SimpleNamespace(publish=published.append))
    times = iter((100.0, 100.5, 101.5))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    for _ in range(3):
        hot._publish_periodically(None)
    assert len(published) == 2
