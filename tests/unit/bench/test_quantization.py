from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kt_runtime.bench.experts.quantization import pack_words, to_fp8_blocks, to_integers
from kt_runtime.errors import InvalidValueError


@pytest.fixture
def matrix() -> Tensor:
    return torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.01


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
