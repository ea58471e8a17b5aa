"""Fixtures around the float64 reference. All are session-scoped, so that hypothesis may call them for every example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from reference import moe
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore, LoraSlot, dense

torch.set_num_threads(1)


@pytest.fixture
def the_best_of_this_machine_afterwards() -> Iterator[None]:
    """For tests that choose an instruction set or a number of threads for linear layers."""
    yield
    dense.configure()


@pytest.fixture(scope="session")
def reference():
    return moe


def per_expert_tensors(experts: moe.ReferenceExperts, prefix: str) -> dict[str, Tensor]:
    parts = {"gate_proj": experts.gate, "up_proj": experts.up, "down_proj": experts.down}
    return {
        f"{prefix}.{e}.{name}.weight": stacked[e].clone()
        for name, stacked in parts.items()
        for e in range(stacked.shape[0])
    }


@pytest.fixture(scope="session")
def expert_tensors() -> Callable[[moe.ReferenceExperts, str], dict[str, Tensor]]:
    return per_expert_tensors


@pytest.fixture(scope="session")
def build_layer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ExpertLayer]:
    """build_layer(experts, isa, num_threads, expert_format): through a checkpoint file into a store's only layer."""
    numbers = count()
    root = tmp_path_factory.mktemp("experts")

    def build(
        experts: moe.ReferenceExperts,
        isa: str | None = None,
        num_threads: int = 2,
        expert_format: str | None = None,
    ) -> ExpertLayer:
        directory = root / str(next(numbers))
        directory.mkdir()
        save_file(per_expert_tensors(experts, "mlp.experts"), directory / "model.safetensors")
        num_experts, inner, hidden = experts.gate.shape
        shape = ExpertShape(num_experts, hidden, inner)
        store = ExpertStore.load(
            directory, {0: "mlp.experts"}, shape, isa=isa, num_threads=num_threads, expert_format=expert_format
        )
        (directory / "model.safetensors").unlink()
        return store.layers[0]

    return build


@dataclass
class Problem:
    """One call: random weights, activations, routing with duplicates and -1, slots of different rank."""

    experts: moe.ReferenceExperts
    x: Tensor
    ids: Tensor
    weights: Tensor
    slots: list[LoraSlot | None]
    token_slots: Tensor | None
    grad_out: Tensor

    @property
    def length(self) -> int:
        """Terms in the sums that a result element goes through."""
        return self.experts.gate.shape[1] + self.experts.gate.shape[2]


def random_slot(num_experts: int, hidden: int, inner: int, rank: int, dtype: torch.dtype, seed: int) -> LoraSlot:
    generator = torch.Generator().manual_seed(seed)

    def tensor(rows: int, cols: int) -> Tensor:
        return (torch.randn(num_experts, rows, cols, generator=generator) * 0.3 / rank**0.5).to(dtype)

    return LoraSlot(
        gate_a=tensor(rank, hidden),
        gate_b=tensor(inner, rank),
        up_a=tensor(rank, hidden),
        up_b=tensor(inner, rank),
        down_a=tensor(rank, inner),
        down_b=tensor(hidden, rank),
        scaling=0.75,
    )


def random_problem(
    num_experts: int,
    hidden: int,
    inner: int,
    tokens: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.float32,
    ranks: tuple[int, ...] = (),
    lora_dtype: torch.dtype = torch.float32,
    id_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    slots: list[LoraSlot | None] = [
        None if rank == 0 else random_slot(num_experts, hidden, inner, rank, lora_dtype, seed + 1 + i)
        for i, rank in enumerate(ranks)
    ]
    return Problem(
        experts=moe.random_experts(num_experts, hidden, inner, seed),
        x=torch.randn(tokens, hidden, generator=generator).to(dtype),
        ids=torch.randint(-1, num_experts, (tokens, top_k), generator=generator).to(id_dtype),
        weights=torch.rand(tokens, top_k, generator=generator),
        slots=slots,
        token_slots=torch.randint(-1, len(ranks), (tokens,), generator=generator).int() if ranks else None,
        grad_out=torch.randn(tokens, hidden, generator=generator).to(dtype),
    )


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return random_problem


def check_close(got: Tensor, wanted: Tensor, length: int, what: str) -> None:
    """Norm of the error against the reference: float32 sums of `length` terms, plus one rounding to got's dtype.

    Of 1,555 results 8.8e-6 was measured, in float32 and for the gradient of few elements, where sums cancel.
    """
    tolerance = 1e-6 * length**0.5
    if got.dtype == torch.bfloat16:
        tolerance += 2.0**-8
    error = (got.double() - wanted).norm().item()
    scale = wanted.norm().item()
    assert error <= tolerance * scale + 1e-12, (
        f"{what}: relative error {error / max(scale, 1e-300):.2e} > {tolerance:.2e}"
    )


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor, int, str], None]:
    return check_close
