from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


def of_file(module: LoraModule, rank: int = 2, order: Sequence[int] | None = None) -> list[Part]:
    """All experts, whose tensors lie in one piece of memory, in this order."""
    experts = range(module.num_experts)
    a = torch.randn(module.num_experts, rank, module.in_features)
    b = torch.randn(module.num_experts, module.out_features, rank)
    return [
        Part(module, expert, LoraPair(a[at], b[at]), 1.0) for expert, at in zip(experts, order or experts, strict=True)
    ]


def test_experts_that_lie_one_behind_the_other_are_not_copied_nor_is_what_is_beside_them(
    modules: list[LoraModule],
) -> None:
    dense, routed = (next(each for each in modules if bool(each.num_experts) == is_routed) for is_routed in (0, 1))
    parts = [part(dense, 2, 1.0), *of_file(routed)]
    folded = fold(parts, 2.0).modules
    assert folded[dense.name].a.data_ptr() == parts[0].pair.a.data_ptr()
    for letter in (0, 1):
        stacked = folded[routed.name][letter]
        assert stacked.data_ptr() == parts[1].pair[letter].data_ptr() and stacked.is_contiguous()
        assert torch.equal(stacked, torch.stack([each.pair[letter] for each in parts[1:]]))


@pytest.mark.parametrize("case", ["order", "one missing", "one scaling", "one rank", "one dtype", "elsewhere"])
def test_other_experts_are_copied_and_everything_with_them(modules: list[LoraModule], case: str) -> None:
    """Else a small tensor would keep the whole file in memory."""
    dense, routed = (next(each for each in modules if bool(each.num_experts) == is_routed) for is_routed in (0, 1))
    other = next(each for each in modules if each.num_experts and each is not routed)
    parts = of_file(routed, order=[1, 0, 2, 3] if case == "order" else None)
    a, b = parts[1].pair
    parts[1:2] = {
        "one missing": [],
        "one scaling": [replace(parts[1], scaling=0.5)],
        "one rank": [replace(parts[1], pair=LoraPair(a[:1], b[:, :1]))],
        "one dtype": [replace(parts[1], pair=LoraPair(a.bfloat16(), b.bfloat16()))],
        "elsewhere": [replace(parts[1], pair=LoraPair(a, b.clone()))],
    }.get(case, [parts[1]])
    whole = [part(dense, 2, 1.0), *of_file(other)]
    folded = fold([*whole, *parts], None).modules
    old = {tensor.untyped_storage().data_ptr() for each in (*whole, *parts) for tensor in each.pair}
    new = {tensor.untyped_storage().data_ptr() for pair in folded.values() for tensor in pair}
    assert not old & new
    for each in parts:
        stacked = folded[routed.name]
        found = delta(stacked.a[each.expert], stacked.b[each.expert], 1.0)
        torch.testing.assert_close(found, delta(*each.pair, each.scaling), rtol=0, atol=0)


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
