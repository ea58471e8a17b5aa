"""Drawn calls of an expert layer, the layer that computes them, and how close to float64 its results have to be."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, TypeVar

import torch
from reference import moe
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore, LoraSlot

T = TypeVar("T")

TOLERANCES = {torch.float32: 1.3e-6, torch.bfloat16: 1.2e-2}
"""Of a result's norm, against float64. Measured on portable, AVX2, AVX-512 and AMX kernels: 1.4e-7 to 5.2e-7 where the
shape is fixed. A bf16 result is rounded once more, and the kernels for AVX-512 and AMX round the factors of their
products too: 2e-3 to 5e-3, and 1.1e-2 for the one element of a drawn case, where roundings do not average out."""


def present(value: T | None) -> T:
    """The value of an argument that a call may leave out, and this one has."""
    assert value is not None
    return value


def tensors_of(slot: LoraSlot | None) -> list[Tensor]:
    """Of an adapter of all projections, in the order of LORA_TENSORS."""
    return [present(tensor) for tensor in present(slot).tensors()]


def per_expert_tensors(experts: moe.ReferenceExperts, prefix: str) -> dict[str, Tensor]:
    parts = {"gate_proj.weight": experts.gate, "up_proj.weight": experts.up, "down_proj.weight": experts.down}
    if experts.biases is not None:
        parts |= dict(zip(("gate_proj.bias", "up_proj.bias", "down_proj.bias"), experts.biases, strict=True))
    return {
        f"{prefix}.{e}.{name}": stacked[e].clone()
        for name, stacked in parts.items()
        for e in range(stacked.shape[0])
        if experts.mlp.has_gate or not name.startswith("gate_proj")
    }


def build_layer(
    experts: moe.ReferenceExperts, isa: str | None = None, num_threads: int = 2, expert_format: str | None = None
) -> ExpertLayer:
    """Through a checkpoint file into a store's only layer."""
    num_experts, inner, hidden = experts.gate.shape
    shape = ExpertShape(num_experts, hidden, inner)
    with tempfile.TemporaryDirectory(prefix="kt-experts-") as directory:
        save_file(per_expert_tensors(experts, "mlp.experts"), Path(directory) / "model.safetensors")
        store = ExpertStore.load(
            Path(directory),
            {0: "mlp.experts"},
            shape,
            isa=isa,
            num_threads=num_threads,
            expert_format=expert_format,
            mlp=experts.mlp,
        )
    return store.layers[0]


class Lora(TypedDict):
    """Arguments of ExpertLayer."""

    slots: list[LoraSlot | None]
    token_slots: Tensor | None


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
    def lora(self) -> Lora:
        return {"slots": self.slots, "token_slots": self.token_slots}

    @property
    def adapters(self) -> list[LoraSlot]:
        """The slots of a problem without ranks of 0."""
        return [present(slot) for slot in self.slots]


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


def assert_close(got: Tensor, wanted: Tensor, what: str, factors: float = 0.0) -> None:
    """As near to the reference as this machine's processor computes it. `factors`: as in `assert_within`."""
    assert_within(got, wanted, TOLERANCES[got.dtype], what, factors)


def assert_within(got: Tensor, wanted: Tensor, tolerance: float, what: str, factors: float = 0.0) -> None:
    """Norm of the error against the reference.

    `factors`: how large the terms are whose sum the result is. Where they cancel, it is as exact as they are large, not
    as it is.
    """
    error = (got.double() - wanted).norm().item()
    scale = max(wanted.norm().item(), factors)
    assert error <= tolerance * scale + 1e-12, (
        f"{what}: relative error {error / max(scale, 1e-300):.2e} > {tolerance:.2e}"
    )
