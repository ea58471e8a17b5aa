"""ExpertLayer.unpack_range: the values of `unpacked`, rounded once, in every format and on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import moe
from reference.cases import choose
from reference.expert_problems import build_layer
from reference.instruction_sets import instruction_sets
from reference.quantized import DISTINCT, SCHEMES, write_checkpoint
from torch import Tensor

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore

HIDDEN, INNER, EXPERTS = 256, 128, 3


def empty(count: int, hidden: int = HIDDEN, inner: int = INNER) -> tuple[Tensor, Tensor]:
    """bfloat16 NaN, so that what is not written is seen."""
    shapes = ((count, 2 * inner, hidden), (count, hidden, inner))
    return torch.full(shapes[0], float("nan")).bfloat16(), torch.full(shapes[1], float("nan")).bfloat16()


def wanted(layer: ExpertLayer, first: int, count: int) -> tuple[Tensor, Tensor]:
    each = [layer.unpacked(expert) for expert in range(first, first + count)]
    w13 = torch.stack([torch.cat([gate, up]) for gate, up, _ in each]).bfloat16()
    return w13, torch.stack([down for *_, down in each]).bfloat16()


@pytest.mark.parametrize("scheme", choose(few=DISTINCT, usual=sorted(SCHEMES), every=sorted(SCHEMES)))
def test_values_are_those_of_unpacked(scheme: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"m": moe.random_experts(EXPERTS, HIDDEN, INNER)}, scheme)
    values: tuple[Tensor, Tensor] | None = None  # the checkpoint's, whatever the instruction set and nodes
    for isa in instruction_sets():
        for nodes in (1, 2):
            shape = ExpertShape(EXPERTS, HIDDEN, INNER)
            store = ExpertStore.load(tmp_path, {0: "m"}, shape, isa=isa, num_threads=2, num_nodes=nodes)
            values = values or wanted(store.layers[0], 0, EXPERTS)
            for first, count in ((0, EXPERTS), (1, 1)):
                w13, w2 = empty(count)
                store.layers[0].unpack_range(first, count, w13, w2)
                for found, value in zip((w13, w2), values, strict=True):
                    assert torch.equal(found, value[first : first + count]), (isa, nodes)


@pytest.mark.parametrize(("hidden", "inner"), [(33, 17), (100, 50), (7, 3)])
def test_sizes_that_are_no_multiple_of_a_tile(hidden: int, inner: int) -> None:
    layer = build_layer(moe.random_experts(3, hidden, inner))
    w13, w2 = empty(2, hidden, inner)
    layer.unpack_range(1, 2, w13, w2)
    for found, value in zip((w13, w2), wanted(layer, 1, 2), strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": 2, "count": 2}, "2 experts from expert 2 on are not a range; there are 3"),
        ({"first": -1}, "1 experts from expert -1 on are not a range"),
        ({"count": 0}, "0 experts from expert 0 on"),
        ({"first": 3}, "1 experts from expert 3 on"),
        ({"w13": torch.zeros(1, 8, 8).bfloat16()}, r"w13 has shape \[1, 8, 8\]; expected \[1, 32, 24\]"),
        ({"w13": torch.zeros(1, 32, 24)}, "w13 has dtype float32; allowed: bfloat16"),
        ({"w2": torch.zeros(1, 16, 24).bfloat16().transpose(1, 2)}, "w2 is not contiguous"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    layer = build_layer(moe.random_experts(3, 24, 16))
    w13, w2 = empty(1, 24, 16)
    arguments: dict[str, Any] = {"first": 0, "count": 1, "w13": w13, "w2": w2} | change
    with pytest.raises(InvalidValueError, match=message):
        layer.unpack_range(**arguments)
    assert w13.isnan().all() and w2.isnan().all()


def test_results_that_share_memory_are_refused() -> None:
    layer = build_layer(moe.random_experts(3, 24, 16))
    room = torch.zeros(2000).bfloat16()
    with pytest.raises(InvalidValueError, match="w2 is written, but shares memory with w13"):
        layer.unpack_range(0, 1, room[:768].view(1, 32, 24), room[767 : 767 + 384].view(1, 24, 16))


def test_a_closed_layer_is_named() -> None:
    layer = build_layer(moe.random_experts(3, 24, 16))
    layer.close()
    with pytest.raises(ConflictError, match="the expert store of this layer is closed"):
        layer.unpack_range(0, 1, *empty(1, 24, 16))
