from __future__ import annotations

import pytest

from kt_runtime.bench.experts.plan import SHAPES, BenchShape, parse_shape
from kt_runtime.errors import InvalidValueError, UnknownNameError


def test_the_named_shapes_are_those_of_their_models() -> None:
    sizes = {name: (s.num_experts, s.top_k, s.hidden, s.intermediate) for name, s in SHAPES.items()}
    assert sizes == {
        "dsv2lite": (64, 6, 2048, 1408),
        "qwen3": (128, 8, 2048, 768),
        "dsv3": (256, 8, 7168, 2048),
        "kimi": (384, 8, 7168, 2048),
    }
    assert all(shape.rank == 8 for shape in SHAPES.values())


@pytest.mark.parametrize("text", ["16x4x256x512x8", "16,4,256,512,8"])
def test_five_numbers_are_a_shape(text: str) -> None:
    assert parse_shape(text) == BenchShape("16x4x256x512x8", 16, 4, 256, 512, 8)


def test_bf16_bytes_are_those_of_three_matrices_an_expert() -> None:
    assert SHAPES["dsv2lite"].bf16_bytes == 64 * 3 * 2048 * 1408 * 2


@pytest.mark.parametrize("text", ["16x4x256x512", "0x1x8x8x8", "4x5x8x8x8", "1x1x8x8x99999999"])
def test_shapes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match=text.split("x")[0]):
        parse_shape(text)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'qwen3'"):
        parse_shape("qwen")
