from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import lora

from kt_runtime.adapters import LoraPair
from kt_runtime.errors import AdapterError
from kt_runtime.sglang_patch.lora.adapter import FusedLora, InstalledAdapter, LoraPart, RankAndAlpha
from kt_runtime.sglang_patch.lora.pool import (
    ExpertBuffersOnHost,
    fill_slot,
    init_with_experts_on_host,
    load_adapters_only,
    load_clearing_base,
    slot_bytes,
)

RANK, MAX_RANK, EXPERTS, IN, OUT = 2, 4, 3, 5, 6


def pool() -> SimpleNamespace:
    """Two slots and one layer of what `fill_slot` touches of SGLang's pool, filled with what may be left in it."""

    def buffers(*stack: int, parts: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        a = torch.full((2, *stack, parts * MAX_RANK, IN), 7.0)
        return [a], [torch.full((2, *stack, parts * OUT, MAX_RANK), 7.0)]

    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "qkv_proj": ((), 3),
        "o_proj": ((), 1),
        "gate_up_proj_moe": ((EXPERTS,), 2),
        "down_proj_moe": ((EXPERTS,), 1),
    }
    made = {name: buffers(*stack, parts=parts) for name, (stack, parts) in shapes.items()}
    return SimpleNamespace(
        A_buffer={name: a for name, (a, _) in made.items()},
        B_buffer={name: b for name, (_, b) in made.items()},
        max_lora_rank=MAX_RANK,
        embedding_A_buffer={},
        embedding_B_buffer={},
        lm_head_A_buffer={"lm_head": torch.full((2, MAX_RANK, IN), 7.0)},
        lm_head_B_buffer={},
    )


def installed(**parts: int) -> InstalledAdapter:
    """An adapter of layer 0 with the given pool names and their numbers of parts."""
    weights: dict[tuple[str, int], FusedLora] = {}
    for name, count in parts.items():
        stack = (EXPERTS,) if name.endswith("_moe") else ()
        pairs = (LoraPair(torch.randn(*stack, RANK, IN), torch.randn(*stack, OUT, RANK)) for _ in range(count))
        weights[name, 0] = tuple(LoraPart(OUT, pair) for pair in pairs)
    return InstalledAdapter("id", RankAndAlpha(RANK, 4.0), weights)


def test_parts_of_dense_linears_follow_each_other() -> None:
    target, adapter = pool(), installed(qkv_proj=3)
    fill_slot(target, 1, adapter)
    weight = lora.joined(adapter.weights["qkv_proj", 0])
    assert torch.equal(target.A_buffer["qkv_proj"][0][1, : 3 * RANK], weight.a)
    assert torch.equal(target.B_buffer["qkv_proj"][0][1, :, :RANK], weight.b)


def test_parts_of_experts_begin_at_multiples_of_the_highest_rank() -> None:
    target, adapter = pool(), installed(gate_up_proj_moe=2, down_proj_moe=1)
    fill_slot(target, 1, adapter)
    a = target.A_buffer["gate_up_proj_moe"][0][1]
    gate, up = (part.pair for part in adapter.weights["gate_up_proj_moe", 0])
    (down,) = (part.pair for part in adapter.weights["down_proj_moe", 0])
    assert gate is not None and up is not None and down is not None
    assert torch.equal(a[:, :RANK], gate.a)
    assert torch.equal(a[:, MAX_RANK : MAX_RANK + RANK], up.a)
    b = target.B_buffer["gate_up_proj_moe"][0][1]
    assert torch.equal(b[:, :, :RANK], torch.cat([gate.b, up.b], dim=1))
    assert torch.equal(target.B_buffer["down_proj_moe"][0][1, :, :, :RANK], down.b)


@pytest.mark.parametrize("name", ["qkv_proj", "gate_up_proj_moe"])
def test_a_part_without_a_pair_is_zero(name: str) -> None:
    target, adapter = pool(), installed(**{name: 3 if name == "qkv_proj" else 2})
    first, *others = adapter.weights[name, 0]
    fill_slot(target, 1, replace(adapter, weights={(name, 0): (first._replace(pair=None), *others)}))
    a, b = target.A_buffer[name][0][1], target.B_buffer[name][0][1]
    distance = RANK if name == "qkv_proj" else MAX_RANK
    assert not a[..., :RANK, :].any() and not b[..., :OUT, :RANK].any()
    for number, part in enumerate(others, start=1):
        assert part.pair is not None
        assert torch.equal(a[..., number * distance : number * distance + RANK, :], part.pair.a)
        assert torch.equal(b[..., number * OUT : (number + 1) * OUT, :RANK], part.pair.b)


def test_an_adapter_of_another_number_of_outputs_is_refused() -> None:
    """The rest of B would be that of the adapter before."""
    target, adapter = pool(), installed(qkv_proj=3)
    shorter = replace(adapter, weights={("qkv_proj", 0): adapter.weights["qkv_proj", 0][:2]})
    with pytest.raises(AdapterError, match=f"{2 * OUT} outputs, the one of the server {3 * OUT}"):
        fill_slot(target, 1, shorter)


def test_the_memory_of_a_slot_is_that_of_the_adapter_s_rank_in_a_and_of_the_highest_in_b() -> None:
    target, adapter = pool(), installed(qkv_proj=3, down_proj_moe=1)
    experts = EXPERTS * (RANK * IN + OUT * MAX_RANK)
    assert slot_bytes(target, adapter) == 4 * (3 * (RANK * IN + OUT * MAX_RANK) + experts)


def test_what_is_not_adapted_is_zero() -> None:
    target = pool()
    fill_slot(target, 1, installed(down_proj_moe=1))
    for name in ("qkv_proj", "o_proj", "gate_up_proj_moe"):
        assert not target.A_buffer[name][0][1].any()
        assert not target.B_buffer[name][0][1].any()
    assert not target.lm_head_A_buffer["lm_head"][1].any()


def test_experts_are_left_alone_by_an_adapter_without_any() -> None:
    target = pool()
    fill_slot(target, 1, installed(o_proj=1))
    assert (target.A_buffer["down_proj_moe"][0][1] == 7.0).all()


def test_the_other_slot_keeps_its_values() -> None:
    target = pool()
    fill_slot(target, 1, installed(qkv_proj=3, o_proj=1, gate_up_proj_moe=2, down_proj_moe=1))
    for buffers in (target.A_buffer, target.B_buffer):
        for name in buffers:
            assert (buffers[name][0][0] == 7.0).all()


def test_sglangs_own_adapters_go_sglangs_way() -> None:
    calls: list[Any] = []
    load_clearing_base(lambda *args: calls.append(args), "pool", "id", 1, "adapter", "modules", None, None)  # type: ignore[arg-type]
    assert calls == [("pool", "id", 1, "adapter", "modules", None, None)]


@pytest.mark.parametrize(("load", "is_cleared"), [(load_adapters_only, False), (load_clearing_base, True)])
def test_the_base_models_slot_is_cleared_on_cuda_only(load: Any, is_cleared: bool) -> None:
    calls: list[Any] = []
    load(lambda *args: calls.append(args), "pool", None, 1, None, "modules", None, None)
    assert bool(calls) == is_cleared


def test_expert_buffers_are_in_host_memory_and_others_where_they_were_wanted() -> None:
    with ExpertBuffersOnHost():
        experts = torch.zeros((2, 3, 4, 5), dtype=torch.bfloat16, device="meta")
        dense = torch.zeros((2, 3, 4), device="meta")
    assert experts.device.type == "cpu"
    assert experts.dtype == torch.bfloat16
    assert dense.device.type == "meta"


@pytest.mark.parametrize(("in_store", "device"), [(True, "cpu"), (False, "meta")])
def test_only_the_stores_experts_get_host_buffers(in_store: bool, device: str) -> None:
    layer = torch.nn.Module()
    if in_store:
        layer.experts_forward = lambda: None  # type: ignore[assignment]
    made: list[torch.Tensor] = []
    init_with_experts_on_host(
        lambda pool, model: made.append(torch.zeros((1, 1, 1, 1), device="meta")), None, torch.nn.Sequential(layer)
    )
    assert made[0].device.type == device
