from __future__ import annotations

from typing import Any

import pytest
import torch

from kt_runtime.adapters import LoraPair
from kt_runtime.adapters.folding import Part, fold
from kt_runtime.families import LoraModule


def part(
    module: LoraModule, rank: int, scaling: float, expert: int | None = None, dtype: torch.dtype = torch.float32
) -> Part:
    generator = torch.Generator().manual_seed(rank)
    pair = LoraPair(
        torch.randn(rank, module.in_features, generator=generator).to(dtype),
        torch.randn(module.out_features, rank, generator=generator).to(dtype),
    )
    return Part(module, expert, pair, scaling)


def delta(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    return scaling * (b.double() @ a.double())


@pytest.fixture
def modules(qwen: Any) -> list[LoraModule]:
    return qwen.family.lora_modules(qwen.config)


def test_uniform_parts_stay_as_they_are_to_the_last_bit(modules: list[LoraModule]) -> None:
    parts = [part(module, 4, 2.0, dtype=torch.bfloat16) for module in modules[:4]]
    adapter = fold(parts, 8.0)
    assert (adapter.rank, adapter.alpha, adapter.notes) == (4, 8.0, ())
    for one in parts:
        pair = adapter.modules[one.module.name]
        assert torch.equal(pair.a, one.pair.a)
        assert torch.equal(pair.b, one.pair.b)
        assert pair.a.dtype == torch.bfloat16


def test_only_beside_experts_tensors_of_a_file_are_copied(modules: list[LoraModule]) -> None:
    """Experts are stacked; what is left of the file would be kept by one small tensor. Otherwise nothing is left."""
    dense = next(each for each in modules if not each.num_experts)
    routed = next(each for each in modules if each.num_experts)
    for others in ([], [part(routed, 2, 1.0, expert=0)]):
        parts = [part(dense, 2, 1.0), *others]
        folded = fold(parts, 2.0).modules[dense.name]
        is_same = [new.data_ptr() == old.data_ptr() for new, old in zip(folded, parts[0].pair, strict=True)]
        assert is_same == [not others] * 2
        assert torch.equal(folded.a, parts[0].pair.a) and torch.equal(folded.b, parts[0].pair.b)


def test_ranks_and_scalings_become_one_without_changing_any_product(modules: list[LoraModule]) -> None:
    parts = [
        part(module, rank, scaling) for module, rank, scaling in zip(modules, (2, 7, 4), (2.0, 0.3, 2.0), strict=False)
    ]
    adapter = fold(parts, None)
    assert adapter.rank == 7
    assert adapter.scaling == 2.0
    for one in parts:
        expected = delta(*one.pair, one.scaling)
        torch.testing.assert_close(
            delta(*adapter.modules[one.module.name], adapter.scaling), expected, rtol=3e-7, atol=3e-7
        )
    assert "1 of 3 modules had another scaling" in adapter.notes[0]
    assert "2 of 3 modules had a rank below 7" in adapter.notes[1]


def test_a_power_of_two_is_folded_exactly_also_in_bfloat16(modules: list[LoraModule]) -> None:
    parts = [part(modules[0], 4, 2.0), part(modules[1], 4, 2.0), part(modules[2], 4, 0.5, dtype=torch.bfloat16)]
    pair = fold(parts, None).modules[modules[2].name]
    assert pair.b.dtype == torch.float32
    assert torch.equal(pair.b * 4, parts[2].pair.b.float())


def test_experts_of_different_ranks_are_stacked_and_missing_ones_are_zero(modules: list[LoraModule]) -> None:
    routed = next(module for module in modules if module.num_experts)
    parts = [part(routed, 2, 1.0, expert=0), part(routed, 4, 3.0, expert=2)]
    adapter = fold(parts, None)
    pair = adapter.modules[routed.name]
    assert pair.a.shape == (4, 4, routed.in_features)
    assert pair.b.shape == (4, routed.out_features, 4)
    for one in parts:
        found = delta(pair.a[one.expert], pair.b[one.expert], adapter.scaling)
        torch.testing.assert_close(found, delta(*one.pair, one.scaling), rtol=3e-7, atol=3e-7)
    assert not pair.b[[1, 3]].any()
