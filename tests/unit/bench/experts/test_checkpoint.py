"""Checkpoints that the benchmark writes, and their quantization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference.drawn import drawn
from torch import Tensor

from kt_runtime.bench.experts.checkpoint import pack_words, prefix, to_fp8_blocks, to_integers, write_checkpoint
from kt_runtime.bench.experts.layer_case import LayerCase
from kt_runtime.bench.experts.plan import FORMATS, BenchShape
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import ExpertShape, ExpertStore

# Largest relative error of a weight matrix (Frobenius) that rounding to the format explains. The comments have what was
# measured.
TOLERANCES = {
    "bf16": 0.0,  # exact
    "fp8": 0.03,  # 0.0266
    "fp8_channel": 0.03,  # 0.0264
    "int8": 0.012,  # 0.0071
    "int8_g128": 0.012,  # 0.0067
    "int8_channel": 0.012,  # 0.0071
    "int4": 0.12,  # 0.089
    "int4_g32": 0.12,  # 0.098
    "int4_g128": 0.15,  # 0.12
    "int4_g128_zp": 0.15,  # 0.101
    "q8_0": 0.008,  # 0.0054
    "q4_0": 0.11,  # 0.087
    "q5_0": 0.06,  # 0.043
    "q4_k": 0.1,  # 0.079
    "q5_k": 0.05,  # 0.038
    "q6_k": 0.025,  # 0.0194
    "mxfp4": 0.15,  # 0.116
    "nvfp4": 0.12,  # 0.096
    "mxfp8": 0.03,  # 0.0268
    "iq4_nl": 0.1,  # 0.081
    "iq4_xs": 0.1,  # 0.081
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_store_reads_what_was_written(case: LayerCase, name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    if name.endswith(("_k", "_xs")):
        case = LayerCase(BenchShape("whole blocks", 3, 2, 256, 512))
    shape = case.shape
    write_checkpoint(tmp_path, form.encoding, case.weights)
    sizes = ExpertShape(shape.num_experts, shape.hidden, shape.intermediate)
    store = ExpertStore.load(tmp_path, {0: prefix(form.encoding)}, sizes, expert_format=form.quantize, num_threads=2)
    for expert in (0, shape.num_experts - 1):
        for got, wanted in zip(store.layers[0].unpacked(expert), case.weights.expert(expert).values(), strict=True):
            error = (got.double() - wanted.double()).norm() / wanted.double().norm()
            assert error <= TOLERANCES[name], f"{name}: {error:.4f}"


def test_weights_are_normal_and_differ_from_expert_to_expert(case: LayerCase) -> None:
    assert abs(float(case.weights.gate_up.float().std()) - 0.02) < 0.0003
    assert abs(float(case.weights.down.float().mean())) < 0.0002
    assert not torch.equal(case.weights.down[0], case.weights.down[1])


@pytest.fixture
def matrix() -> Tensor:
    return drawn(96, 256, seed=0) * 0.02 + 0.01


def test_fp8_blocks_give_the_matrix_back_to_three_bits(matrix: Tensor) -> None:
    values, scales = to_fp8_blocks(matrix[:, :200])
    assert values.shape == (96, 200) and scales.shape == (1, 2)
    back = values.float() * scales.repeat_interleave(128, 0)[:96].repeat_interleave(128, 1)[:, :200]
    assert ((back - matrix[:, :200]).abs() <= matrix[:, :200].abs() / 16 + scales.max() / 512).all()


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 128), (8, 256)])
def test_codes_and_scales_give_the_matrix_back_to_one_and_a_half_steps(
    matrix: Tensor, bits: int, group: int, zero_points: bool
) -> None:
    codes, scales, zeros = to_integers(matrix, bits, group, zero_points)
    assert (zeros is None) == (not zero_points)
    wide = scales.float().repeat_interleave(group, 1)
    shifted = codes.float() if zeros is None else codes.float() - zeros.float().repeat_interleave(group, 1)
    assert ((shifted * wide - matrix).abs() <= wide * 1.55).all()


def test_a_matrix_without_whole_groups_is_refused(matrix: Tensor) -> None:
    with pytest.raises(InvalidValueError, match="groups of 100 columns"):
        to_integers(matrix, 4, 100, False)


def test_words_hold_codes_from_the_lowest_bits_up() -> None:
    codes = torch.tensor([[-8, -7, 7, 0, 1, 2, 3, -1]], dtype=torch.int8)
    assert int(pack_words(codes, 4).item()) & 0xFFFFFFFF == 0x7BA98F10
