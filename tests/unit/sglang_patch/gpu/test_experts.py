"""The eager break around CPU experts, in SGLang's own breakable graphs (`reference.recorded_graph`)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.on_device.recorded_graph import GraphBackend
from torch import Tensor

from kt_runtime.errors import ConflictError, NumericsError
from kt_runtime.experts.gpu import staging
from kt_runtime.experts.gpu.staging import StagingBuffers
from kt_runtime.sglang_patch.gpu import experts, replays

HIDDEN, EXPERTS, TOP_K = 8, 4, 2


class Layer:
    """A router, routed experts on the "host", and a shared expert; `sizes`: rows of each call of the experts."""

    def __init__(self, log: list[str], size: int, *, has_shared: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.log, self.has_shared = log, has_shared
        self.x = torch.zeros(size, HIDDEN)
        self.router = torch.randn(HIDDEN, EXPERTS, generator=generator)
        self.experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)
        self.shared = torch.randn(HIDDEN, HIDDEN, generator=generator)
        self.factors: dict[int, float] = {-1: 1.0}
        self.token_slots: Tensor | None = None
        self.sizes: list[int] = []
        self.staged: list[StagingBuffers] = []
        self.error: Exception | None = None

    def adapters(self, num_tokens: int) -> tuple[Sequence[Any], Tensor | None]:
        return (), None if self.token_slots is None else self.token_slots[:num_tokens]

    def compute(
        self, x: Tensor, ids: Tensor, weights: Tensor, slots: Sequence[Any], token_slots: Tensor | None, out: Tensor
    ) -> Tensor:
        if self.error is not None:
            raise self.error
        self.log.append("host computes")
        self.sizes.append(len(x))
        self.staged.append(staging._buffers.current)
        chosen = (self.experts[ids] @ x[:, None, :, None]).squeeze(-1)
        factors = [1.0] * len(x) if token_slots is None else [self.factors[slot] for slot in token_slots.tolist()]
        return out.copy_((chosen * weights[..., None]).sum(1) * torch.tensor(factors)[:, None])

    def forward(self) -> Tensor:
        """A decoder layer's MLP on `self.x`, the static input of its graph."""
        weights, ids = torch.softmax(self.x @ self.router, -1).topk(TOP_K)
        if not self.has_shared:
            return experts.forward(self.compute, self.x, ids, weights, self.adapters) * 2 + self.x
        with experts.deferring():
            routed = experts.forward(self.compute, self.x, ids, weights, self.adapters)
            shared = self.x @ self.shared
            self.log.append("shared experts queued")
            experts.finish_deferred()
            return (routed + shared) * 2 + self.x

    def eager(self, x: Tensor) -> Tensor:
        """What the layer gives for `x` without a graph."""
        kept, self.x = self.x, x
        result = self.forward()
        self.x = kept
        del self.sizes[-1], self.staged[-1]
        return result

    def fill(self, num_tokens: int, seed: int) -> SimpleNamespace:
        """Writes a batch to the static input, with NaN in the rows of padding; returns SGLang's batch."""
        self.x.fill_(float("nan"))
        self.x[:num_tokens] = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
        return SimpleNamespace(batch_size=num_tokens)


@pytest.fixture(params=[False, True], ids=["routed", "routed-and-shared"])
def layer(request: pytest.FixtureRequest, graphs: GraphBackend, log: list[str]) -> Layer:
    """Captured for 4 tokens."""
    made = Layer(log, 4, has_shared=request.param)
    graphs.capture(4, made.forward)
    return made


def test_neither_a_capture_nor_its_warm_ups_compute(layer: Layer) -> None:
    assert layer.sizes == []


@pytest.mark.parametrize("num_tokens", [4, 3, 1])
def test_each_replay_gives_what_an_eager_pass_gives(layer: Layer, graphs: GraphBackend, num_tokens: int) -> None:
    for seed in range(3):
        batch = layer.fill(num_tokens, seed)
        found = graphs.replay(4, batch)[:num_tokens].clone()
        assert torch.equal(found, layer.eager(layer.x[:num_tokens].clone()))


def test_padding_is_neither_computed_nor_left_over(layer: Layer, graphs: GraphBackend) -> None:
    graphs.replay(4, layer.fill(4, seed=0))
    batch = layer.fill(2, seed=1)
    layer.x[2:] = 0  # the result's padding is then what the experts' result has there
    assert torch.equal(graphs.replay(4, batch)[2:], torch.zeros(2, HIDDEN))
    assert layer.sizes == [4, 2]


def test_adapters_are_those_of_the_replay(layer: Layer, graphs: GraphBackend) -> None:
    layer.factors |= {0: 3.0, 1: -5.0}
    for token_slots in ([-1, -1, -1, -1], [0, -1, 1, 0], [1, 1, 1, 1]):
        layer.token_slots = torch.tensor(token_slots, dtype=torch.int32)
        found = graphs.replay(4, layer.fill(4, seed=5)).clone()
        assert torch.equal(found, layer.eager(layer.x.clone()))
    layer.factors[1] = 7.0  # a version published in the slot of another
    found = graphs.replay(4, layer.fill(4, seed=5)).clone()
    assert torch.equal(found, layer.eager(layer.x.clone()))


def test_an_eager_pass_computes_every_row_in_the_threads_own_buffers(layer: Layer) -> None:
    layer.fill(4, seed=1)
    layer.forward()
    assert layer.sizes == [4]
    assert layer.staged == [staging._buffers.current]


def test_decode_sizes_never_share_buffers(
    graphs: GraphBackend, log: list[str], sets: dict[int, StagingBuffers]
) -> None:
    layers = {size: [Layer(log, size), Layer(log, size)] for size in (4, 2, 1)}
    for size, stack in layers.items():
        for number, each in enumerate(stack):
            graphs.capture((size, number), each.forward)
    assert sorted(sets) == [1, 2, 4]
    kept = {size: addresses(buffers) for size, buffers in sets.items()}
    for size, stack in layers.items():
        for number, each in enumerate(stack):
            graphs.replay((size, number), each.fill(size, seed=size))
            assert each.staged == [sets[size]]
    every = [address for found in kept.values() for address in found.values()]
    assert len(set(every)) == len(every) == 3 * 5
    for size, buffers in sets.items():
        assert addresses(buffers) == kept[size], "a replay allocates nothing"
        wanted = {"x": (size, HIDDEN), "ids": (size, TOP_K), "weights": (size, TOP_K), "out": (size, HIDDEN)}
        for name, shape in wanted.items():
            assert buffers.get(name)._bytes.numel() == torch.Size(shape).numel() * (8 if name == "ids" else 4)


def addresses(buffers: StagingBuffers) -> dict[str, int]:
    return {name: buffers.get(name)._bytes.data_ptr() for name in ("x", "ids", "weights", "token_slots", "out")}


def test_prefills_use_the_threads_own_buffers_and_their_own_number_of_tokens(
    graphs: GraphBackend, log: list[str], sets: dict[int, StagingBuffers]
) -> None:
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    prefill = Layer(log, 4)
    with prefill_graph_scope(full_graph=False):
        graphs.capture(4, prefill.forward)
    batch = prefill.fill(3, seed=1)
    batch.batch_size = 1  # one request of three tokens
    with prefill_graph_scope(full_graph=False, raw_num_tokens=3):
        found = graphs.replay(4, batch)[:3].clone()
    assert (prefill.sizes, prefill.staged, sets) == ([3], [staging._buffers.current], {})
    assert torch.equal(found, prefill.eager(prefill.x[:3].clone()))


def test_the_device_has_the_shared_experts_queued_before_the_host_computes(
    graphs: GraphBackend, log: list[str]
) -> None:
    layer = Layer(log, 4, has_shared=True)
    graphs.capture(4, layer.forward)
    del log[:]
    graphs.replay(4, layer.fill(4, seed=0))
    assert log == [
        "replayed 0",  # up to the router
        "model records",
        "replayed 1",  # the shared experts
        "experts waits for model's event",
        "host computes",
        "experts records",
        "model waits for experts's event",
        "replayed 2",  # their sum
    ]


def test_an_eager_pass_overlaps_them_too(graphs: GraphBackend, log: list[str]) -> None:
    layer = Layer(log, 4, has_shared=True)
    layer.fill(4, seed=0)
    layer.forward()
    assert log[:3] == ["model records", "shared experts queued", "experts waits for model's event"]


def test_without_shared_experts_a_layer_is_one_break_on_the_models_stream(graphs: GraphBackend, log: list[str]) -> None:
    layer = Layer(log, 4)
    graphs.capture(4, layer.forward)
    del log[:]
    graphs.replay(4, layer.fill(4, seed=0))
    assert log == ["replayed 0", "host computes", "replayed 1"]


def test_an_error_ends_the_replay_and_the_next_one_is_right(layer: Layer, graphs: GraphBackend) -> None:
    layer.error = NumericsError("x has NaN in row 1")
    with pytest.raises(NumericsError, match="row 1"):
        graphs.replay(4, layer.fill(4, seed=0))
    assert replays.current() is None and not replays.is_preparing()
    layer.error = None
    found = graphs.replay(4, layer.fill(4, seed=1)).clone()
    assert torch.equal(found, layer.eager(layer.x.clone()))


def test_an_error_of_an_eager_pass_leaves_nothing_to_finish(graphs: GraphBackend, log: list[str]) -> None:
    layer = Layer(log, 4, has_shared=True)
    layer.error = NumericsError("x has NaN in row 1")
    with pytest.raises(NumericsError):
        layer.forward()
    assert log[-1] == "model waits for experts's event", "the batch's memory is free then"
    experts.finish_deferred()
    layer.error = None
    layer.fill(4, seed=0)
    layer.forward()
    assert layer.sizes == [4]


def test_experts_that_nobody_finishes_are_an_error(graphs: GraphBackend, log: list[str]) -> None:
    layer = Layer(log, 4)
    with pytest.raises(ConflictError, match="were not finished"), experts.deferring():
        layer.forward()
    with pytest.raises(ConflictError, match="called again before"), experts.deferring():
        layer.forward()
        layer.forward()
