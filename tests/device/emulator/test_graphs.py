"""CPU experts in breakable graphs on the emulated device, under several schedules; forgotten waits are found.

Once with the device's own graphs, once with recorded ones, whose segments queue their operators again.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from device import backend
from reference.on_device import graphs as bodies
from reference.on_device.graphs import *  # noqa: F403
from reference.on_device.graphs import layer, stack  # noqa: F401
from reference.on_device.recorded_graph import GraphBackend, RecordedGraph

from kt_runtime.errors import KtError
from kt_runtime.experts import ExpertLayer
from kt_runtime.sglang_patch.gpu import experts

WEAK_REFERENCES = "sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor"
FORGOTTEN = {
    "the router is not awaited": "    stream.wait_event(routed)\n",
    "the result is not awaited": "        model_stream.wait_event(device.recorded(stream))\n",
}


SEEDS = 20


@pytest.fixture
def device(late_device: torch.device, schedule: str) -> torch.device:
    name, _, seed = schedule.partition("-")
    backend.set_schedule(name, int(seed or 0))
    return late_device


@pytest.fixture(params=["late", "eager", "random-0", "random-1"])
def schedule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class DeviceGraph(torch.accelerator.Graph):
    """The device's graph, called as SGLang calls `torch.cuda.CUDAGraph`."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        super().capture_begin()


@pytest.fixture(params=[DeviceGraph, RecordedGraph], ids=["captured", "recorded"])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GraphBackend:
    """SGLang's kernel for references that keep no memory alive needs CUDA's library; here they keep it."""
    where = backend.enable()
    monkeypatch.setattr(RecordedGraph, "log", [], raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", request.param)
    monkeypatch.setitem(sys.modules, WEAK_REFERENCES, SimpleNamespace(weak_ref_tensors=lambda tensor: tensor))  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "_sets", {})
    monkeypatch.setattr(experts, "_streams", {})
    return GraphBackend(torch.Stream(device=where))


def run(made: bodies.Stack, graphs: GraphBackend) -> None:
    graphs.capture(bodies.SIZE, made.forward)
    bodies.test_replays_of_full_and_padded_batches_give_an_eager_pass_s_bits(made, graphs)
    bodies.test_replays_follow_each_other_without_mixing(made, graphs)


def test_every_order_of_the_streams_gives_the_same_bits(
    layer: ExpertLayer,  # noqa: F811
    late_device: torch.device,
    graphs: GraphBackend,
) -> None:
    made = bodies.Stack(layer, late_device, bodies.SIZE, has_shared=True)
    graphs.capture(bodies.SIZE, made.forward)
    for seed in range(SEEDS):
        torch.accelerator.synchronize()
        backend.set_schedule("random", seed)
        bodies.test_replays_follow_each_other_without_mixing(made, graphs)


def test_the_host_waits_for_its_own_copies_only(
    layer: ExpertLayer,  # noqa: F811
    late_device: torch.device,
    graphs: GraphBackend,
) -> None:
    made = bodies.Stack(layer, late_device, bodies.SIZE, has_shared=True)
    graphs.capture(bodies.SIZE, made.forward)
    batch = made.fill(bodies.SIZE, seed=1)
    with backend.no_hidden_waits():
        found = graphs.replay(bodies.SIZE, batch)
    assert torch.equal(found.cpu(), made.forward().cpu())


@pytest.mark.parametrize("forgotten", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_forgotten_wait_is_found(
    layer: ExpertLayer,  # noqa: F811
    late_device: torch.device,
    graphs: GraphBackend,
    monkeypatch: pytest.MonkeyPatch,
    forgotten: str,
) -> None:
    source = inspect.getsource(experts._finish)
    assert forgotten in source
    planted = dict(vars(experts))
    exec(source.replace(forgotten.strip(), "pass"), planted)
    monkeypatch.setattr(experts, "_finish", planted["_finish"])
    experts._breaks.cache_clear()
    try:
        with pytest.raises((AssertionError, KtError)):
            run(bodies.Stack(layer, late_device, bodies.SIZE, has_shared=True), graphs)
    finally:
        experts._breaks.cache_clear()
