"""What the probe does in a slice: the engine's thread runs it, between two batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.lora import huge_adapter, random_adapter

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.errors import AdapterError
from kt_runtime.resident.publishing import probe
from kt_runtime.resident.publishing.probe import Probe
from kt_runtime.resident.scheduler import Slice, run_at_once


@pytest.fixture
def lab(make_lab: Callable[..., Any]) -> Any:
    return make_lab("qwen3_moe")


def of_dtype(adapter: AdapterTensors, dtype: torch.dtype) -> AdapterTensors:
    pairs = {name: LoraPair(pair.a.to(dtype), pair.b.to(dtype)) for name, pair in adapter.modules.items()}
    return AdapterTensors.from_modules(adapter.rank, adapter.alpha, pairs)


def read_by_experts(
    lab: Any, monkeypatch: pytest.MonkeyPatch, adapter: AdapterTensors
) -> tuple[list[Any], list[Slice]]:
    """The tensors that the experts have while a layer runs, and the probe's slices."""
    found: list[Any] = []
    real = lab.twin.run_layer

    def noted(layer: int, *given: Any) -> torch.Tensor:
        experts = lab.twin.experts_of(layer)
        found.extend(experts.adapters[probe.KEY].tensors())
        return real(layer, *given)

    monkeypatch.setattr(lab.twin, "run_layer", noted)
    slices = Probe(lab.twin, lab.lora, lab.host.config).slices(adapter, "it")
    return found, [each for each in slices if isinstance(each, Slice)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_experts_read_an_adapter_of_any_size_where_it_lies(
    lab: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Copying a layer's A and B would stop every stream: a second for an adapter of gigabytes."""
    adapter = of_dtype(random_adapter(lab.host.config, rank=4, alpha=8.0, seed=1), dtype)
    found, slices = read_by_experts(lab, monkeypatch, adapter)
    owned = {tensor.data_ptr() for name, pair in adapter.modules.items() if ".experts." in name for tensor in pair}
    assert {tensor.data_ptr() for tensor in found} == owned
    assert not [each for each in slices if each.kind == "probe conversion"]


def test_half_precision_is_converted_some_experts_at_a_time(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = of_dtype(random_adapter(lab.host.config, rank=4, alpha=8.0, seed=1), torch.float16)
    experts = {name: pair for name, pair in adapter.modules.items() if ".experts." in name}
    most = 2 * max(tensor[0].numel() for pair in experts.values() for tensor in pair)
    monkeypatch.setattr(probe, "SLICE_ELEMENTS", most)
    found, slices = read_by_experts(lab, monkeypatch, adapter)
    sizes = [each.size for each in slices if each.kind == "probe conversion"]
    assert max(sizes) <= most
    assert sum(sizes) >= sum(tensor.numel() for pair in experts.values() for tensor in pair)
    expected = [tensor.float() for pair in experts.values() for tensor in pair]
    assert all(any(torch.equal(one, other) for other in expected) for one in found)
    assert len(found) == len(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_that_overflow_are_found_in_every_dtype(lab: Any, dtype: torch.dtype) -> None:
    adapter = of_dtype(huge_adapter(lab.host.config, only=("experts",)), dtype)
    with pytest.raises(AdapterError, match="not finite"):
        run_at_once(Probe(lab.twin, lab.lora, lab.host.config).slices(adapter, "it"))
