"""Packed weights dequantized by PyTorch's operators, in CPU memory; the bodies run on a device too (tests/device).

Every format that the store reads. Their sizes in slots and the choice of a form are here too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import moe
from reference.cases import choose
from reference.expert_problems import build_layer
from reference.on_device.hot import built, check_dequantized
from reference.quantized import DISTINCT, SCHEMES
from torch import is_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unit.experts.quantized.test_gguf_layers import KINDS

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import ExpertShape
from kt_runtime.experts.gpu.hot import packed, slots
from kt_runtime.experts.gpu.hot.packed import formats_of, packed_format
from kt_runtime.experts.gpu.hot.slots import (
    PackedSlots,
    Scratch,
    chosen_form,
    expert_bytes,
    scratch_bytes,
    slot_bytes,
)

CPU = torch.device("cpu")
EVERY = [*SCHEMES, *KINDS]
FORMATS = choose(few=[*DISTINCT, "Q8_0", "Q5_0", "MXFP4", "Q4_K_M", "IQ4_NL", "IQ4_XS"], usual=EVERY, every=EVERY)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_the_store_s_in_every_format(kind: str) -> None:
    check_dequantized(CPU, kind, hidden=256, inner=512)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_channel", "int4_g32", "int4_g32_zp", "int8", "Q8_0", "MXFP4"])
def test_groups_and_blocks_that_are_not_full(kind: str) -> None:
    """Padded rows, and a last group that is shorter."""
    check_dequantized(CPU, kind, hidden=160, inner=96)


@pytest.mark.parametrize(("hidden", "inner"), [(33, 17), (100, 50), (7, 3)])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_channel", "int8", "int4_channel"])
def test_sizes_that_are_no_multiple_of_a_tile(kind: str, hidden: int, inner: int) -> None:
    check_dequantized(CPU, kind, hidden, inner)


@pytest.mark.parametrize("kind", ["int4_g32", "fp8", "Q4_K_M"])
def test_a_wrong_byte_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    carry = PackedSlots.carry

    def flipped(self: PackedSlots, layer: slots.CarriedLayer, expert: int, buffer: torch.Tensor) -> None:
        carry(self, layer, expert, buffer)
        buffer[-1] ^= 3  # of the last column's code

    monkeypatch.setattr(PackedSlots, "carry", flipped)
    with pytest.raises(AssertionError):
        check_dequantized(CPU, kind, 256, 256)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_slot_has_the_bytes_of_the_store(kind: str) -> None:
    layer, _ = built(kind, 3, 256, 512)
    sizes = slot_bytes(layer.shape, torch.bfloat16, "published", {4: layer.format})
    assert sizes == {4: layer.native().resident_bytes // 3}
    assert PackedSlots(layer.shape, 1, layer.format, Scratch(layer.shape, torch.bfloat16, CPU)).expert_bytes == sizes[4]


def test_two_to_four_times_as_many_experts_fit() -> None:
    shape = ExpertShape(128, 2048, 768)
    plain = slot_bytes(shape, torch.bfloat16, "model", {0: "int4_g32"})[0]
    assert plain == expert_bytes(shape, torch.bfloat16) == 9_437_184
    for name, times in (("fp8_e4m3_g128", 1.98), ("int8", 1.99), ("int4_g128_zp", 3.6), ("int4_g32", 3.5)):
        assert plain / slot_bytes(shape, torch.bfloat16, "published", {0: name})[0] > times, name


def test_the_form_follows_the_store_s_formats() -> None:
    assert chosen_form("auto", {1: "bf16", 2: "bf16"}) == "model"
    assert chosen_form("auto", {1: "bf16", 2: "int4k_g32+int6k_g16"}) == "published"
    assert chosen_form("auto", {1: "int4_g32", 2: "fp6_g32"}) == "model"
    assert chosen_form("published", {1: "bf16"}) == "published"
    assert chosen_form("model", {1: "int8"}) == "model"


def test_a_format_that_is_not_known_is_refused() -> None:
    assert packed_format("fp6_g32") is None and formats_of("int4_g32+fp6_g32") is None
    shape = ExpertShape(8, 64, 32)
    with pytest.raises(InvalidValueError, match="published: experts in 'fp6_g32' can't be dequantized on the GPU"):
        slot_bytes(shape, torch.bfloat16, "published", {0: "int8", 1: "fp6_g32"})


def test_a_buffer_of_another_size_is_refused() -> None:
    layer = build_layer(moe.random_experts(3, 64, 32), expert_format="int4")
    bytes_of_one = layer.native().resident_bytes // 3
    for count in (bytes_of_one - 1, bytes_of_one + 1):
        with pytest.raises(InvalidValueError, match=f"out has {count} bytes; expert 1 has {bytes_of_one}"):
            layer.copy_packed(1, torch.empty(count, dtype=torch.uint8))
    with pytest.raises(InvalidValueError, match="expert 3 is out of range"):
        layer.copy_packed(3, torch.empty(bytes_of_one, dtype=torch.uint8))


class Allocations(TorchDispatchMode):
    """`most`: bytes of the tensors made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if is_tensor(one)}
        out = func(*args, **(kwargs or {}))
        self._alive = {place: known for place, known in self._alive.items() if not known[0].expired()}
        if is_tensor(out) and (storage := out.untyped_storage()).data_ptr() not in given:
            self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4_g32", "int8_g128_zp", "Q4_K_M", "MXFP4", "Q5_0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantizing_takes_no_more_memory_than_is_planned(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (packed, slots):
        monkeypatch.setattr(module, "MOST_WEIGHTS_AT_ONCE", 1 << 16)
    layer, _ = built(kind, 3, 512, 256)
    scratch = Scratch(layer.shape, dtype, CPU)
    made = PackedSlots(layer.shape, 3, layer.format, scratch)
    made.held.zero_()
    with Allocations() as seen:
        made.weights(torch.arange(3))
    planned = scratch_bytes(layer.shape, dtype) - scratch.w13.nbytes - scratch.w2.nbytes
    print(f"{kind} {dtype}: {seen.most} bytes, {planned} planned")
    assert planned / 8 < seen.most <= planned
