"""Adapters of routed experts in replays of SGLang's breakable graphs: those of the batch, whatever the capture saw.

SGLang's LoRA manager, its memory pool and a tiny model's expert store are real; the graph is a recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from reference.on_device.recorded_graph import GraphBackend

from kt_runtime.errors import ConflictError
from kt_runtime.families import family_for
from kt_runtime.sglang_patch.cpu import moe
from kt_runtime.sglang_patch.gpu import experts
from kt_runtime.sglang_patch.lora import step as lora_step
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_adapter
from kt_runtime.sglang_patch.store import expert_store

SIZE = 4


class Captured:
    """The routed experts of the model's last layer with routed experts, captured for SIZE decoding requests."""

    def __init__(self, served: SimpleNamespace, graphs: GraphBackend) -> None:
        self.layer_id = family_for(served.config).moe_layers(served.config)[-1]
        self.wrapper = served.model.get_submodule(f"model.layers.{self.layer_id}.mlp.experts")
        self.manager, self.config, self.graphs = served.manager, served.config, graphs
        self.x = torch.zeros(SIZE, served.config["hidden_size"])
        self.ids = torch.zeros(SIZE, served.config["num_experts_per_tok"], dtype=torch.int64)
        self.weights = torch.zeros(self.ids.shape)
        self.num_experts = expert_store().layers[self.layer_id].shape.num_experts
        self.prepare([None] * SIZE)  # as SGLang prepares the batch of a capture
        graphs.capture(SIZE, self.forward)

    def forward(self) -> torch.Tensor:
        compute = partial(moe._compute, self.layer_id)
        return experts.forward(compute, self.x, self.ids, self.weights, self.wrapper.adapters)

    def prepare(self, lora_ids: Sequence[str | None]) -> SimpleNamespace:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch = SimpleNamespace(
            lora_ids=list(lora_ids), forward_mode=ForwardMode.DECODE, batch_size=len(lora_ids), spec_info=None
        )
        self.manager.fetch_new_loras(set(lora_ids))
        self.manager.prepare_lora_batch(batch)
        return batch

    def check(self, lora_ids: Sequence[str | None], seed: int = 0) -> torch.Tensor:
        """A replay gives the bits of the layer itself, called eagerly for the same requests."""
        generator = torch.Generator().manual_seed(seed)
        rows = len(lora_ids)
        self.x[:rows] = torch.randn(rows, self.x.shape[1], generator=generator)
        self.ids[:rows] = torch.randint(self.num_experts, (rows, self.ids.shape[1]), generator=generator)
        self.weights[:rows] = torch.rand(rows, self.ids.shape[1], generator=generator)
        found = self.graphs.replay(SIZE, self.prepare(lora_ids))[:rows].clone()
        topk = SimpleNamespace(topk_ids=self.ids[:rows], topk_weights=self.weights[:rows])
        assert torch.equal(found, self.wrapper(self.x[:rows].clone(), topk))
        return found


@pytest.fixture
def captured(served: SimpleNamespace, manager: Any, graphs: GraphBackend) -> Captured:
    return Captured(served, graphs)


def publish(captured: Captured, reference: ModuleType, lora_id: str, seed: int, rank: int = 4) -> None:
    adapter = reference.random_adapter(captured.config, rank=rank, alpha=2.0 * rank, seed=seed)
    install_adapter(captured.manager, captured.config, lora_id, lora_id, f"content {seed}", adapter)


def test_a_version_published_after_the_capture_is_what_answers(captured: Captured, reference: ModuleType) -> None:
    base = captured.check([None] * 3)
    publish(captured, reference, "first", seed=1)
    first = captured.check(["first"] * 3)
    publish(captured, reference, "second", seed=2)
    drop_adapter(captured.manager, "first")
    second = captured.check(["second"] * 3)
    assert not torch.equal(base, first) and not torch.equal(first, second)
    assert torch.equal(captured.check([None] * 3), base)


def test_two_adapters_and_the_base_are_mixed_in_one_replay(captured: Captured, reference: ModuleType) -> None:
    publish(captured, reference, "small", seed=1, rank=2)
    publish(captured, reference, "large", seed=2, rank=8)
    alone = {name: captured.check([name] * 4) for name in ("small", "large", None)}
    mixed = captured.check(["large", None, "small", "large"])
    for row, name in enumerate(["large", None, "small", "large"]):
        assert torch.equal(mixed[row], alone[name][row])


def test_a_batch_prepared_for_other_tokens_is_refused(captured: Captured, reference: ModuleType) -> None:
    publish(captured, reference, "small", seed=1)
    captured.prepare(["small"] * 2)
    with pytest.raises(ConflictError, match="the batch has 3 tokens, but LoRA was prepared for 2"):
        captured.graphs.replay(SIZE, SimpleNamespace(batch_size=3))


def test_nothing_that_a_graph_holds_moves_with_publishing_and_evictions(
    captured: Captured, reference: ModuleType, served: SimpleNamespace
) -> None:
    def addresses() -> list[int]:
        parameters = [parameter.data_ptr() for parameter in served.model.parameters()]
        return [*parameters, *lora_step.addresses(captured.manager)]

    before = addresses()
    for number in range(6):  # the pool has four slots, one of them the base's
        publish(captured, reference, f"v{number}", seed=number)
    for lora_ids in (["v0", "v1", "v2"], ["v3", "v4", None], ["v5", "v0", "v3"], ["v1"]):
        captured.check(lora_ids)
    drop_adapter(captured.manager, "v1")
    captured.check(["v5", None])
    assert addresses() == before
