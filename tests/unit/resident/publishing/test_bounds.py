"""An adapter that the bounds let through survives the probe; the bounds are wide enough for the adapters of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.lora import huge_adapter, random_adapter

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.adapters.tensors import contents_of
from kt_runtime.errors import AdapterError
from kt_runtime.resident.publishing.bounds import Bounds
from kt_runtime.resident.publishing.probe import Probe
from kt_runtime.resident.scheduler import run_at_once


@pytest.fixture(params=["deepseek_v3", "qwen3_moe"])
def lab(request: pytest.FixtureRequest, make_lab: Callable[..., Any]) -> Any:
    return make_lab(request.param)


def lets_through(lab: Any, adapter: AdapterTensors) -> bool:
    return Bounds(lab.twin, lab.host.config).exclude_overflow(adapter, contents_of(adapter))


def constant(lab: Any, value: float) -> AdapterTensors:
    """The worst case for a largest element: all elements have this value, so every sum is as large as it can be."""
    adapter = random_adapter(lab.host.config, rank=4, alpha=8.0, seed=1)
    pairs = {name: LoraPair(pair.a * 0 + value, pair.b * 0 + value) for name, pair in adapter.modules.items()}
    return AdapterTensors.from_modules(4, 8.0, pairs)


def survives(lab: Any, adapter: AdapterTensors) -> bool:
    try:
        run_at_once(Probe(lab.twin, lab.lora, lab.host.config).slices(adapter, "it"))
    except AdapterError:
        return False
    return True


@pytest.mark.slow
def test_the_largest_adapter_that_is_let_through_survives_the_probe(lab: Any) -> None:
    values = [2.0**exponent for exponent in range(-8, 60)]
    let_through = [value for value in values if lets_through(lab, constant(lab, value))]
    assert let_through == values[: len(let_through)] and let_through[-1] > 0.5
    assert survives(lab, constant(lab, let_through[-1]))
    assert not survives(lab, constant(lab, 2.0**60))  # so the probe sees what the bounds are for


def test_adapters_of_users_need_no_probe_and_huge_ones_do(lab: Any) -> None:
    assert lets_through(lab, random_adapter(lab.host.config, rank=8, alpha=16.0, seed=1))
    assert not lets_through(lab, huge_adapter(lab.host.config))
    for group in ("attention", "experts"):
        assert not lets_through(lab, huge_adapter(lab.host.config, only=(group,)))


def test_a_high_rank_needs_no_probe(lab: Any) -> None:
    """As `kt-runtime bench swap` makes adapters of 3 GB: B of 0.01, five standard deviations in every element."""
    adapter = random_adapter(lab.host.config, rank=4, alpha=4.0, seed=1)
    rank = 4096
    pairs = {
        name: LoraPair(pair.a.sign() * 5 * pair.a.shape[-1] ** -0.5, pair.b.sign() * 5 * 0.01)
        for name, pair in adapter.modules.items()
    }
    measured = contents_of(AdapterTensors.from_modules(4, 4.0, pairs))
    high = AdapterTensors.from_modules(rank, float(rank), pairs)
    assert Bounds(lab.twin, lab.host.config).exclude_overflow(high, measured)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_that_is_not_finite_is_let_through(lab: Any, value: float) -> None:
    adapter = random_adapter(lab.host.config, rank=4, alpha=8.0, seed=1)
    list(adapter.modules.values())[-1].b[-1, -1, -1] = value
    assert not lets_through(lab, adapter)


def test_a_model_without_norms_before_its_linears_has_no_bounds(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = constant(lab, 1e-3)
    views = {name: view for name, view in lab.twin.views().items() if name != "model.layers.1.input_layernorm.weight"}
    with monkeypatch.context() as patch:
        patch.setattr(lab.twin, "views", lambda: views)
        assert not lets_through(lab, adapter)
    with monkeypatch.context() as patch:
        patch.setattr(lab.twin, "dtype", torch.float16)  # 65504 at most
        assert not lets_through(lab, adapter)
    assert lets_through(lab, adapter)
