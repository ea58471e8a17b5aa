"""CPU experts in SGLang's breakable graphs on a device: a replay gives the bits of an eager pass with the same tensors.

Bodies of tests: a folder for a device imports them. Its conftest or module has the fixtures `device`, and `graphs`, a
`GraphBackend` for that device. The router and the shared expert are small matrices on the device, the routed experts an
expert store's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from reference.on_device.experts import SHAPE, TOP_K, adapter
from reference.on_device.experts import layer as layer
from reference.on_device.recorded_graph import GraphBackend
from torch import Tensor

from kt_runtime.experts import ExpertLayer, LoraSlot
from kt_runtime.sglang_patch.gpu import experts

SIZE = 8


class Stack:
    """`num_layers` alike layers with residuals on a static input, as a decoder's MLPs follow each other in a graph."""

    def __init__(
        self, layer: ExpertLayer, device: torch.device, size: int, *, has_shared: bool, num_layers: int = 2
    ) -> None:
        generator = torch.Generator().manual_seed(4)
        self.layer, self.device, self.has_shared, self.num_layers = layer, device, has_shared, num_layers
        self.x = torch.zeros(size, SHAPE.hidden, device=device)
        self.router = (torch.randn(SHAPE.hidden, SHAPE.num_experts, generator=generator) * 0.3).to(device)
        self.shared = (torch.randn(SHAPE.hidden, SHAPE.hidden, generator=generator) * 0.1).to(device)
        self.slots: Sequence[LoraSlot] = ()
        self.token_slots: Tensor | None = None

    def adapters(self, num_tokens: int) -> tuple[Sequence[LoraSlot], Tensor | None]:
        return self.slots, None if self.token_slots is None else self.token_slots[:num_tokens]

    def compute(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        slots: Sequence[LoraSlot],
        token_slots: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        return self.layer.forward(x, ids, weights, slots=slots, token_slots=token_slots, out=out)

    @torch.no_grad()
    def forward(self) -> Tensor:
        x = self.x * 1.0
        for _ in range(self.num_layers):
            x = x + self._experts(x)
        return x

    def _experts(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(x @ self.router, -1).topk(TOP_K)
        if not self.has_shared:
            return experts.forward(self.compute, x, ids, weights, self.adapters)
        with experts.deferring():
            routed = experts.forward(self.compute, x, ids, weights, self.adapters)
            shared = x @ self.shared
            experts.finish_deferred()
            return routed + shared

    def fill(self, num_tokens: int, seed: int) -> SimpleNamespace:
        """A new batch in the static input, zeros as padding. Returns what SGLang knows of the batch."""
        self.x.zero_()
        found = torch.randn(num_tokens, SHAPE.hidden, generator=torch.Generator().manual_seed(seed))
        self.x[:num_tokens].copy_(found)
        return SimpleNamespace(batch_size=num_tokens)

    def use(self, slots: Sequence[LoraSlot], token_slots: Sequence[int]) -> None:
        self.slots, padded = slots, [*token_slots, *[-1] * (len(self.x) - len(token_slots))]
        self.token_slots = torch.tensor(padded, dtype=torch.int32).to(self.device) if slots else None

    def check(self, graphs: GraphBackend, key: object, num_tokens: int, seed: int) -> Tensor:
        """Rows of the tokens, on the host."""
        batch = self.fill(num_tokens, seed)
        found = graphs.replay(key, batch)[:num_tokens].cpu()
        assert torch.equal(found, self.forward()[:num_tokens].cpu())
        assert torch.isfinite(found).all()
        return found


@pytest.fixture(params=[False, True], ids=["routed", "routed-and-shared"])
def stack(request: pytest.FixtureRequest, layer: ExpertLayer, device: torch.device, graphs: GraphBackend) -> Stack:
    made = Stack(layer, device, SIZE, has_shared=request.param)
    graphs.capture(SIZE, made.forward)
    return made


def test_replays_of_full_and_padded_batches_give_an_eager_pass_s_bits(stack: Stack, graphs: GraphBackend) -> None:
    for seed, num_tokens in enumerate((SIZE, 3, 1, SIZE, 5)):
        stack.check(graphs, SIZE, num_tokens, seed)


def test_replays_follow_each_other_without_mixing(stack: Stack, graphs: GraphBackend) -> None:
    """Nothing is awaited between them but what the breaks await."""
    wanted, found = [], []
    for seed in range(4):
        stack.fill(SIZE, seed)
        wanted.append(stack.forward())
    for seed in range(4):
        found.append(graphs.replay(SIZE, stack.fill(SIZE, seed)).clone())
    assert all(torch.equal(f.cpu(), w.cpu()) for f, w in zip(found, wanted, strict=True))


def test_an_adapter_published_after_the_capture_answers(stack: Stack, graphs: GraphBackend) -> None:
    base = stack.check(graphs, SIZE, 4, seed=1)
    stack.use([adapter(seed=5)], [0] * 4)
    first = stack.check(graphs, SIZE, 4, seed=1)
    stack.use([adapter(seed=6)], [0] * 4)
    second = stack.check(graphs, SIZE, 4, seed=1)
    assert not torch.equal(base, first) and not torch.equal(first, second)
    stack.use((), ())
    assert torch.equal(stack.check(graphs, SIZE, 4, seed=1), base)


def test_two_adapters_and_the_base_are_mixed(stack: Stack, graphs: GraphBackend) -> None:
    both = [adapter(seed=5), adapter(seed=6)]
    stack.use(both, [1, -1, 0, 1, 0])
    mixed = stack.check(graphs, SIZE, 5, seed=2)
    for slot in (0, 1):
        stack.use(both, [slot] * 5)
        alone = stack.check(graphs, SIZE, 5, seed=2)
        rows = [row for row, of in enumerate([1, -1, 0, 1, 0]) if of == slot]
        assert torch.equal(alone[rows], mixed[rows])


def test_sizes_take_turns(layer: ExpertLayer, device: torch.device, graphs: GraphBackend) -> None:
    stacks = {size: Stack(layer, device, size, has_shared=True) for size in (8, 4, 2)}
    for size, made in stacks.items():
        graphs.capture(size, made.forward)
    for seed in range(3):
        for size, made in stacks.items():
            made.check(graphs, size, size - seed % 2, seed)


def test_a_prefill_s_graph_computes_the_tokens_of_all_its_requests(
    layer: ExpertLayer, device: torch.device, graphs: GraphBackend
) -> None:
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    made = Stack(layer, device, 32, has_shared=True)
    with prefill_graph_scope(full_graph=False):
        graphs.capture("prefill", made.forward)
    made.fill(29, seed=1)
    with prefill_graph_scope(full_graph=False, raw_num_tokens=29):
        found = graphs.replay("prefill", SimpleNamespace(batch_size=2))[:29].cpu()
    assert torch.equal(found, made.forward()[:29].cpu())
