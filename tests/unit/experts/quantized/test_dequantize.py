"""Dequantized matrices against the exact values that the reference writer knows, over every scheme."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from reference.drawn import drawn
from reference.quantized import SCHEMES
from safetensors.torch import save_file

from kt_runtime.errors import CheckpointError
from kt_runtime.experts.dequantize import plain_tensors, unpacked

QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.config is not None and not scheme.fused]


def zero_offset(scheme: str) -> int:
    config = SCHEMES[scheme].config or {}
    return 0 if config.get("checkpoint_format") == "gptq_v2" else 1


def stored(scheme: str, rows: int, cols: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weight = drawn(rows, cols, seed=rows) / cols**0.5
    tensors, values = SCHEMES[scheme].store(weight)
    return {f"model.q_proj{part}": tensor for part, tensor in tensors.items()}, values


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize(("rows", "cols"), [(40, 256), (264, 384)])
def test_every_scheme_gives_the_exact_values(tmp_path: Path, scheme: str, rows: int, cols: int) -> None:
    tensors, values = stored(scheme, rows, cols)
    save_file(tensors | {"model.norm.weight": torch.ones(3).bfloat16()}, tmp_path / "a.safetensors")
    files = [str(tmp_path / "a.safetensors")]
    found = dict(plain_tensors(files, torch.float32, gptq_zero_offset=zero_offset(scheme)))
    assert set(found) == {"model.q_proj.weight", "model.norm.weight"}
    assert torch.equal(found["model.q_proj.weight"], values.float())
    rounded = dict(plain_tensors(files, torch.bfloat16, gptq_zero_offset=zero_offset(scheme)))
    assert torch.equal(rounded["model.q_proj.weight"], values.float().bfloat16())


@pytest.mark.parametrize(("rows", "cols"), [(130, 300), (80, 128), (1, 1)])
def test_fp8_blocks_need_not_divide_the_matrix(tmp_path: Path, rows: int, cols: int) -> None:
    tensors, values = stored("fp8", rows, cols)
    save_file(tensors, tmp_path / "a.safetensors")
    found = dict(plain_tensors([str(tmp_path / "a.safetensors")], torch.float32))
    assert torch.equal(found["model.q_proj.weight"], values.float())


def test_fp8_blocks_of_compressed_tensors_have_their_scales_under_another_name(tmp_path: Path) -> None:
    tensors, values = stored("fp8", 130, 300)
    tensors["model.q_proj.weight_scale"] = tensors.pop("model.q_proj.weight_scale_inv")
    save_file(tensors, tmp_path / "a.safetensors")
    found = dict(plain_tensors([str(tmp_path / "a.safetensors")], torch.float32))
    assert torch.equal(found["model.q_proj.weight"], values.float())


@pytest.mark.parametrize("scheme", ["fp8", "int4_g32", "gptq_int4_g128_zp", "awq_g32"])
def test_scales_may_lie_in_another_file_before_or_after(tmp_path: Path, scheme: str) -> None:
    tensors, values = stored(scheme, 64, 256)
    codes = next(iter(tensors))
    save_file({codes: tensors[codes]}, tmp_path / "b.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != codes}, tmp_path / "a.safetensors")
    for order in ("ab", "ba"):
        files = [str(tmp_path / f"{letter}.safetensors") for letter in order]
        found = dict(plain_tensors(files, torch.float32))
        assert list(found) == ["model.q_proj.weight"]
        assert torch.equal(found["model.q_proj.weight"], values.float())


def test_plain_tensors_come_as_they_are_and_unwanted_ones_do_not_come(tmp_path: Path) -> None:
    tensors = {
        "model.a.weight": torch.randn(4, 4).half(),
        "model.gate.e_score_correction_bias": torch.randn(4),
        "model.table": torch.arange(4),
        "model.mlp.experts.0.up_proj.qweight": torch.ones(4, 4, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    found = dict(plain_tensors([str(tmp_path / "a.safetensors")], torch.bfloat16, lambda name: "experts" not in name))
    assert set(found) == set(tensors) - {"model.mlp.experts.0.up_proj.qweight"}
    assert all(
        torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype for name, tensor in found.items()
    )


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "no scales"),
        ({"weight": torch.zeros(130, 4).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}, r"\[2, 1\]"),
        (
            {"weight": torch.zeros(4, 4).bfloat16(), "weight_scale_inv": torch.ones(1, 1)},
            "expected torch.float8_e4m3fn",
        ),
        ({"weight": torch.zeros(4, 4, dtype=torch.int8), "weight_scale": torch.ones(4, 3)}, "not 3 groups"),
        ({"qweight": torch.zeros(4, 4, dtype=torch.int32), "scales": torch.ones(1, 4)}, "only scales"),
        ({"weight_packed": torch.zeros(4, 4, dtype=torch.int32), "weight_scale": torch.ones(4, 1)}, "can't be deq"),
    ],
)
def test_what_cannot_be_understood_is_an_error_that_names_the_tensor(
    tmp_path: Path, tensors: dict[str, torch.Tensor], said: str
) -> None:
    save_file({f"model.q_proj.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=said) as refused:
        list(plain_tensors([str(tmp_path / "a.safetensors")], torch.float32))
    assert re.search(r"a\.safetensors: 'model\.q_proj\.\w+' can't be dequantized", str(refused.value))


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    tensors, _ = stored("gptq_int4_g128", 64, 256)
    tensors["model.q_proj.g_idx"] = tensors["model.q_proj.g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="another order"):
        list(plain_tensors([str(tmp_path / "a.safetensors")], torch.float32))


def test_unpacked_codes_of_a_word_with_its_highest_bit_set() -> None:
    words = torch.tensor([[-0x01234568]], dtype=torch.int32)  # 0xFEDCBA98
    assert unpacked(words, 4).tolist() == [[8, 9, 10, 11, 12, 13, 14, 15]]
    assert unpacked(words, 8).tolist() == [[0x98, 0xBA, 0xDC, 0xFE]]
    assert unpacked(words, 4, (7, 6, 5, 4, 3, 2, 1, 0)).tolist() == [[15, 14, 13, 12, 11, 10, 9, 8]]
