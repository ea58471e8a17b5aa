"""Linear layers whose matrices stay quantized, against float64 products with the weights that the `gguf` package reads.

float32 rows are multiplied exactly. bfloat16 rows are quantized to int8: the reference rounds them in the same way, so
that the tolerance is that of float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from reference.instruction_sets import instruction_sets

from kt_runtime.bench.experts.gguf_blocks import to_blocks, write_tensors
from kt_runtime.errors import CheckpointError, InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.experts.gguf import GgufTensors
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families.gguf import DENSE_TYPES, Held, Part, packed_bytes
from kt_runtime.ops.matmul import frozen_linear

FLOAT32 = 2e-6  # relative to the length of the result; 4.9e-7 measured, 2.1e-7 of rows in int8
FLOAT32_GRADIENT = 1.1e-6  # 1.15e-7 measured
BF16_GRADIENT = 2.0**-7  # weights and result are rounded, each by 2^-8 at most; 2.5e-3 measured
COLUMNS = 512
SINGLE = [(kind, kind, kind) for kind in DENSE_TYPES]
MIXED = ("Q4_K", "Q4_K", "Q6_K")  # queries, keys and values of llama.cpp's Q4_K_M
ROWS = (72, 16, 25)  # of the three tensors: also no whole blocks of 16


@pytest.fixture(autouse=True)
def best_instruction_set() -> Iterator[None]:
    yield
    dense.configure()


def matrices(kinds: Sequence[str], columns: int = COLUMNS) -> tuple[list[np.ndarray], torch.Tensor]:
    """Blocks of three tensors, and what they stand for [rows, columns], float64."""
    random = np.random.default_rng(3)
    blocks = [
        to_blocks((random.standard_normal((rows, columns)) * (1 + index)).astype(np.float32), kind)
        for index, (rows, kind) in enumerate(zip(ROWS, kinds, strict=True))
    ]
    values = [
        gguf.quants.dequantize(each, gguf.GGMLQuantizationType[kind]) for each, kind in zip(blocks, kinds, strict=True)
    ]
    return blocks, torch.from_numpy(np.concatenate(values).astype(np.float64))


def as_it_is(name: str) -> Held:
    return Held(name, (), (Part(name, ()),))


def packed(place: Path, kinds: Sequence[str], dtype: torch.dtype) -> tuple[PackedWeight, torch.Tensor]:
    blocks, values = matrices(kinds)
    names = [f"blk.0.attn_{part}.weight" for part in "qkv"]
    write_tensors(place / "m.gguf", dict(zip(names, zip(kinds, blocks, strict=True), strict=True)))
    with GgufTensors([place / "m.gguf"]) as tensors:
        return tensors.packed([as_it_is(name) for name in names], dtype), values


def in_int8(x: torch.Tensor, group: int) -> torch.Tensor:
    """x with each group of columns rounded to 127 steps, float64. Factors are float32, so that ties fall the same."""
    groups = x.float().reshape(len(x), -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (torch.full_like(largest, 127) / largest)).round()  # `127 / x` is 127 * (1 / x)
    return (codes.double() * (largest / 127).double()).reshape(x.shape)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def rows(count: int, columns: int = COLUMNS, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("kinds", [*SINGLE, MIXED], ids="-".join)
def test_products_are_those_of_the_file_s_weights(tmp_path: Path, kinds: tuple[str, str, str], isa: str) -> None:
    dense.configure(isa)
    bias = rows(1, sum(ROWS), seed=2)[0]
    weight, values = packed(tmp_path, kinds, torch.float32)
    rounded = PackedWeight(weight.native, torch.bfloat16)
    for count in (1, 3, 70):
        x = rows(count)
        wanted = x.double() @ values.T + bias.double()
        assert relative(dense.linear(x, weight, bias), wanted) <= FLOAT32
        low = x.bfloat16()
        parts = zip(kinds, values.split(ROWS), strict=True)
        wanted = torch.cat([in_int8(low, 16 if kind == "Q6_K" else 32) @ part.T for kind, part in parts], 1)
        found = dense.linear(low, rounded, out_dtype=torch.float32)
        assert relative(found, wanted) <= FLOAT32
        # A fault of one code's size is found.
        wanted[0, 5] += 0.01 * wanted.norm()
        assert relative(found, wanted) > 10 * FLOAT32
        with_bias = dense.linear(low, rounded, bias, out_dtype=torch.float32)
        assert torch.equal(with_bias, found + bias)
        assert torch.equal(dense.linear(low, rounded, bias.bfloat16()), (found + bias.bfloat16()).bfloat16())


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("kinds", [*SINGLE, MIXED], ids="-".join)
def test_gradients_are_those_of_the_file_s_weights(tmp_path: Path, kinds: tuple[str, str, str], isa: str) -> None:
    dense.configure(isa)
    weight, values = packed(tmp_path, kinds, torch.float32)
    for count in (1, 250):
        by_out = rows(count, sum(ROWS), seed=4)
        wanted = by_out.double() @ values
        assert relative(dense.linear_backward(by_out, weight), wanted) <= FLOAT32_GRADIENT
        low = dense.linear_backward(by_out.bfloat16(), PackedWeight(weight.native, torch.bfloat16))
        assert relative(low, by_out.bfloat16().double() @ values) <= BF16_GRADIENT


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads_and_in_a_slice(
    tmp_path: Path, isa: str, dtype: torch.dtype
) -> None:
    weight, _ = packed(tmp_path, MIXED, dtype)
    x, by_out = rows(300).to(dtype), rows(300, sum(ROWS), seed=4).to(dtype)
    dense.configure(isa, 1)
    whole, gradient = dense.linear(x, weight), dense.linear_backward(by_out, weight)
    dense.configure(isa, 3)
    for first, last in ((0, 1), (7, 24), (40, 300)):
        assert torch.equal(dense.linear(x[first:last], weight), whole[first:last])
        assert torch.equal(dense.linear_backward(by_out[first:last], weight), gradient[first:last])
    start = 0
    for size in ROWS:
        assert torch.equal(dense.linear(x, weight[start : start + size]), whole[:, start : start + size])
        start += size


def test_a_row_with_nan_or_inf_has_no_finite_result_and_leaves_the_others(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, _ = packed(tmp_path, MIXED, dtype)
        x = rows(5).to(dtype)
        correct = dense.linear(x, weight)
        for bad in (float("nan"), float("inf")):
            x[2, 100] = bad
            found = dense.linear(x, weight)
            assert not torch.isfinite(found[2]).any()
            assert torch.equal(found[[0, 1, 3, 4]], correct[[0, 1, 3, 4]])


def test_it_stands_for_a_parameter(tmp_path: Path) -> None:
    """Where SGLang and the twin have theirs: differentiable for x, sliced by tensors, counted by its bytes."""
    weight, values = packed(tmp_path, MIXED, torch.float32)
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    assert isinstance(parameter, PackedWeight) and parameter.shape == (sum(ROWS), COLUMNS)
    assert parameter.dtype == torch.float32 and parameter.data_ptr() == weight.data_ptr() != 0
    x = rows(3).requires_grad_()
    frozen_linear(x, parameter).sum().backward()
    assert x.grad is not None and relative(x.grad, values.sum(0).expand(3, -1)) <= 3.5e-7  # 3.5e-8
    assert (
        weight.nbytes
        == len(weight.content())
        == sum(packed_bytes(kind, size, COLUMNS) for kind, size in zip(MIXED, ROWS, strict=True))
    )
    values_part = weight[sum(ROWS[:2]) :]
    assert values_part.shape == (ROWS[2], COLUMNS) and torch.equal(
        values_part.content(), weight.content()[-values_part.nbytes :]
    )
    with pytest.raises(InvalidValueError, match=r"rows 0:71 of a packed matrix, whose tensors end at rows \[72, 88, 1"):
        weight[:71]
    with pytest.raises(InvalidValueError, match="only linear layers of kt-runtime can use it"):
        weight + 1


def test_a_bad_scale_is_refused_with_its_tensor(tmp_path: Path) -> None:
    blocks, _ = matrices(MIXED)
    blocks[2][3, 208:210] = np.array([np.inf], "<f2").view(np.uint8)  # the first block's d of Q6_K
    names = [f"blk.0.attn_{part}.weight" for part in "qkv"]
    write_tensors(tmp_path / "m.gguf", dict(zip(names, zip(MIXED, blocks, strict=True), strict=True)))
    with (
        GgufTensors([tmp_path / "m.gguf"]) as tensors,
        pytest.raises(CheckpointError, match=r"m.gguf: tensor 'blk.0.attn_v.weight' holds a scale that is NaN"),
    ):
        tensors.packed([as_it_is(name) for name in names], torch.float32)


@pytest.mark.parametrize("order", [None, "reversed"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_ranks_rows_and_columns_have_the_bits_of_the_whole_matrix(
    tmp_path: Path, kind: str, order: str | None
) -> None:
    """Rows of several runs, rows behind the last, and half of the columns for the gradient."""
    blocks, _ = matrices([kind] * 3)
    write_tensors(tmp_path / "m.gguf", {"m": (kind, blocks[0])})
    count = len(blocks[0])
    shape = (count, 512)
    held = Held("m", shape, (Part("m", shape),), tuple(reversed(range(count))) if order else None)
    own = torch.cat([torch.arange(5, 21), torch.arange(count - 3, count + 4)])
    x, by_out = rows(7, 512).bfloat16(), rows(7, count).bfloat16()
    with GgufTensors([tmp_path / "m.gguf"]) as tensors:
        whole = tensors.packed([held], torch.bfloat16)
        part = tensors.split([held], torch.bfloat16, [own])
        taken = part.detach()
        assert isinstance(taken, PackedWeight)
        right = taken.columns(range(256, 512))
    products, expected = dense.linear(x, part), dense.linear(x, whole)
    assert torch.equal(products[:, :-4], expected[:, own[:-4]])
    assert not products[:, -4:].any()
    assert torch.equal(dense.linear_backward(by_out, right), dense.linear_backward(by_out, whole)[:, 256:])
    with pytest.raises(InvalidValueError, match="columns of a packed matrix of 0 tensors"):
        whole.columns(range(256))
