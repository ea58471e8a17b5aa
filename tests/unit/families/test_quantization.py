"""What a quantization_config is understood to say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.quantized import SCHEMES

from kt_runtime.errors import CheckpointError, UnknownNameError
from kt_runtime.families.quantization import ExpertFormat, Quantization, quantization_of

QUANTIZED = {name: scheme for name, scheme in SCHEMES.items() if scheme.config is not None and not scheme.fused}
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


def read(scheme: str, **changes: Any) -> Quantization:
    found = quantization_of({"quantization_config": {**(SCHEMES[scheme].config or {}), **changes}})
    assert found is not None
    return found


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_scheme_is_read_and_its_tensors_are_known(name: str) -> None:
    quantization = read(name)
    assert quantization.expert_format.name == QUANTIZED[name].format
    rows, cols = 48, 256
    tensors, _ = QUANTIZED[name].store(torch.randn(rows, cols))
    expected = quantization.stored((rows, cols))
    assert {f".{part}" for part, entry in expected.items() if not entry.is_optional} <= set(tensors)
    assert set(tensors) <= {f".{part}" for part in expected}
    for part, tensor in tensors.items():
        entry = expected[part.removeprefix(".")]
        assert tuple(tensor.shape) == entry.shape
        assert DTYPES[tensor.dtype] in entry.dtypes


def test_a_checkpoint_that_is_not_quantized_has_none() -> None:
    assert quantization_of({}) is None
    assert quantization_of({"quantization_config": None}) is None


def test_the_older_key_of_compressed_tensors_is_read_too() -> None:
    settings = {**(SCHEMES["int4_g32"].config or {})}
    settings.pop("quant_method")
    found = quantization_of({"compression_config": settings})
    assert found is not None and found.description == "compressed-tensors pack-quantized, 4 bits, groups of 32"


@pytest.mark.parametrize(("method", "near"), [("bitsandbytes", ""), ("gptqq", "did you mean 'gptq'"), (None, "")])
def test_an_unknown_method_is_refused_by_name_with_the_known_ones(method: str | None, near: str) -> None:
    with pytest.raises(UnknownNameError) as refused:
        quantization_of({"quantization_config": {"quant_method": method}})
    assert all(part in str(refused.value) for part in (repr(str(method)), near, "awq, compressed-tensors, fp8, gptq"))


@pytest.mark.parametrize(
    ("scheme", "changes", "said"),
    [
        ("fp8", {"weight_block_size": [64, 128]}, r"'weight_block_size' is \[64, 128\]; only \[128, 128\]"),
        ("fp8", {"weight_block_size": None}, "'weight_block_size' is None"),
        ("fp8", {"fmt": "e5m2"}, "'fmt' is 'e5m2'; allowed: e4m3, float8_e4m3fn"),
        ("fp8", {"activation_scheme": "static"}, "'activation_scheme' is 'static'"),
        ("gptq_int4_g128", {"bits": 3}, "'bits' is 3; allowed: 4, 8"),
        ("gptq_int4_g128", {"group_size": 48}, "'group_size' is 48; allowed: -1, or a multiple of 32"),
        ("gptq_int4_g128", {"group_size": True}, "'group_size' is True"),
        ("gptq_int4_g128", {"desc_act": True}, "'desc_act' is True; only False"),
        ("gptq_int4_g128", {"dynamic": {"-:.*": {}}}, "each module must have the same parameters"),
        ("gptq_int4_g128", {"checkpoint_format": "marlin"}, "unknown checkpoint_format 'marlin'"),
        ("gptq_int4_g128", {"sym": "yes"}, "'sym' is 'yes'; expected true or false"),
        ("awq_g32", {"version": "gemv"}, "'version' is 'gemv'; only 'gemm'"),
        ("awq_g32", {"bits": 8}, "'bits' is 8; allowed: 4"),
        ("awq_g32", {"zero_point": False}, "'zero_point' is False"),
        ("int4_g32", {"config_groups": {}}, "expected an object with one group"),
        ("int4_g32", {"config_groups": {"a": {}}}, "'weights' is None; expected an object"),
        ("int4_g32", {"format": "marlin-24"}, "unknown compressed-tensors format 'marlin-24'"),
        ("nvfp4", {"format": "mxfp4-pack-quantized"}, "'strategy' is 'tensor_group'; only 'group'"),
        ("mxfp8", {"format": "nvfp4-pack-quantized"}, "'num_bits' is 8; only 4"),
        ("int4_g32", {"format": "nvfp4-pack-quantized"}, "'type' is 'int'; only 'float'"),
        ("nvfp4_modelopt", {"quant_algo": "FP8"}, "'quant_algo' is 'FP8'; only 'NVFP4'"),
        ("nvfp4_modelopt", {"quant_algo": None}, "'quant_algo' is None; only 'NVFP4'"),
        ("nvfp4_modelopt", {"group_size": 32}, "'group_size' is 32; only 16"),
        ("nvfp4_modelopt", {"config_groups": ["all"]}, "expected an object of objects"),
        ("mxfp8_method", {"weight_block_size": [128, 128]}, r"'weight_block_size' is \[128, 128\]; only \[1, 32\]"),
    ],
)
def test_what_a_known_method_cannot_be_used_with_is_refused(scheme: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, UnknownNameError), match=said):
        read(scheme, **changes)


@pytest.mark.parametrize("settings", ["fp8", ["fp8"], 8])
def test_settings_that_are_no_object_are_refused(settings: object) -> None:
    with pytest.raises(CheckpointError, match="expected an object with 'quant_method'"):
        quantization_of({"quantization_config": settings})


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"num_bits": 3}, "'num_bits' is 3"),
        ({"strategy": "tensor"}, "'tensor'"),
        ({"actorder": "group"}, "'actorder' is 'group'"),
        ({"dynamic": True}, "'dynamic' is True"),
        ({"type": "float"}, "'float'"),
    ],
)
def test_weights_of_compressed_tensors_that_cannot_be_used(weights: dict[str, Any], said: str) -> None:
    groups = (SCHEMES["int4_g32"].config or {})["config_groups"]
    changed = {"group_0": {**groups["group_0"], "weights": {**groups["group_0"]["weights"], **weights}}}
    with pytest.raises(CheckpointError, match=said):
        read("int4_g32", config_groups=changed)


def test_float_blocks_of_compressed_tensors_are_stored_as_fp8s() -> None:
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    found = quantization_of({"quantization_config": {**settings, "config_groups": {"group_0": {"weights": weights}}}})
    assert found is not None and found.expert_format == ExpertFormat("fp8_e4m3", 128)
    assert found.description == "compressed-tensors float-quantized, 8 bits, blocks of 128x128"
    assert found.stored((130, 300))["weight_scale"].shape == (2, 3)


def test_a_matrix_that_is_not_whole_groups_is_refused() -> None:
    with pytest.raises(CheckpointError, match="200 columns, which are not whole groups of 128"):
        read("int4_g128").stored((64, 200))


@pytest.mark.parametrize(
    ("held", "rows", "cols", "size_bytes"),
    [
        (ExpertFormat("bf16"), 64, 128, 64 * 128 * 2),
        (ExpertFormat("bf16"), 60, 100, 64 * 128 * 2),
        (ExpertFormat("fp8_e4m3", 128), 64, 128, 64 * 128 + 4 * (64 + 64)),
        (ExpertFormat("int8"), 64, 128, 64 * 128 + 4 * 64),
        (ExpertFormat("int4", 32), 64, 128, 64 * 64 + 4 * (64 + 4 * 32)),
        (ExpertFormat("mxfp4", 32), 64, 128, 64 * 64 + 4 * (64 + 4 * 16)),
        (ExpertFormat("int4", 128, True), 64, 256, 64 * 128 + 4 * (64 + 2 * 32 + 64)),
        (ExpertFormat("nvfp4", 16), 64, 128, 64 * 64 + 4 * (64 + 128)),
        (ExpertFormat("mxfp4", 32), 64, 128, 64 * 64 + 4 * (64 + 64)),
        (ExpertFormat("mxfp8", 32), 64, 128, 64 * 128 + 4 * (64 + 64)),
    ],
)
def test_packed_bytes_count_scales_zeros_and_padding(held: ExpertFormat, rows: int, cols: int, size_bytes: int) -> None:
    assert held.packed_bytes(rows, cols) == size_bytes
