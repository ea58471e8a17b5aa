"""A recipe's words about placement and memory, against the server that is there: one line each, never an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.memory.placement import Placement
from kt_runtime.serve.memory.resident_notes import compare, placement_notes, placement_of_name, resident_notes
from kt_runtime.train.recipe import Recipe
from kt_runtime.wire.replies import StatusReply

RULES = """\
- match: {name: "experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KSFTExpertsCPU, backend: AMXInt8}
"""


def status(**values: Any) -> StatusReply:
    known: dict[str, Any] = {
        field: {"str": "x", "int": 1, "float": 0.5, "GpuExperts | None": None}.get(str(kind), [])
        for field, kind in StatusReply.__annotations__.items()
    }
    chosen = {
        "expert_format": "bf16",
        "expert_isa": "avx512",
        "device": "cuda:0",
        "expert_threads": 32,
        "chunked_prefill_tokens": 8192,
        "microbatch_tokens": 2048,
        "context_tokens": 4096,
        "model_directory": "/models/m",
    }
    return StatusReply(**{**known, **chosen, "request_id": "r", **values})


def recipe(**keys: Any) -> Recipe:
    return Recipe(**{"source": "recipe.yaml", "places": dict.fromkeys(keys, "recipe.yaml:7"), **keys})


def test_a_placement_that_is_the_residents_needs_no_line() -> None:
    assert compare(Placement("int8", 1, (), "amx"), status(expert_format="int8", expert_isa="amx")) == []
    assert compare(Placement(None, 1, ()), status()) == []


def test_each_difference_of_placement_is_a_line() -> None:
    assert compare(Placement("int8", 4, (), "amx"), status(expert_format="bf16+int4_g32")) == [
        "asks for int8 experts; the resident ones are bf16+int4_g32",
        "asks for amx kernels; the resident experts use avx512",
        "asks for 4 GPUs; the resident model is on one device (cuda:0)",
    ]


def test_a_rule_file_is_compared_wherever_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    for rule in (tmp_path / "rules.yaml", Path("rules.yaml")):
        mine = recipe(kt_optimize_rule=rule, source=str(tmp_path / "recipe.yaml"))
        assert placement_notes(mine, status(expert_isa="amx")) == [
            "recipe.yaml:7: kt_optimize_rule: asks for int8 experts; the resident ones are bf16"
        ]
    assert placement_notes(recipe(), status()) == []
    (tmp_path / "rules.yaml").write_text(RULES.replace("KSFTExpertsCPU", "KSFTExpertCPU"))
    with pytest.raises(InvalidValueError, match="did you mean 'KSFTExpertsCPU'"):
        placement_notes(mine, status())


def test_a_rule_file_that_is_not_here_is_read_by_its_name() -> None:
    rule = Path("examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml")
    (line,) = placement_notes(recipe(kt_optimize_rule=rule), status())
    assert line == (
        f"recipe.yaml:7: kt_optimize_rule: {rule} is not here, and placement is the resident model's: asks for amx "
        "kernels; the resident experts use avx512; asks for 2 GPUs; the resident model is on one device (cuda:0)"
    )
    (line,) = placement_notes(recipe(kt_optimize_rule=Path("DeepSeek-V2-Chat.yaml")), status())
    assert line.endswith("placement is the resident model's: no difference by its name")


@pytest.mark.parametrize(
    ("name", "isa", "devices"),
    [
        ("DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml", "amx", 2),
        ("DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml", "amx", 4),
        ("DeepSeek-V3-Chat-multi-gpu-fp8-linear-ggml-experts.yaml", None, 2),
        ("Qwen3Moe-sft-amx.yaml", "amx", 1),
        ("DeepSeek-V3-Chat.yaml", None, 1),
        ("camxa.yaml", None, 1),
    ],
)
def test_what_a_shipped_files_name_says(name: str, isa: str | None, devices: int) -> None:
    placement = placement_of_name(name)
    assert (placement.expert_isa, placement.num_devices) == (isa, devices)


def test_keys_that_agree_with_the_server_need_no_line(tmp_path: Path) -> None:
    same = recipe(
        cpu_infer=32,
        chunk_size=8192,
        kt_weight_path=tmp_path / "experts",
        kt_non_expert_weight_path=tmp_path,
        kt_config={"backend": "AMXBF16", "expert_weight_format": "bf16", "model_max_length": 4096},
    )
    assert resident_notes(same, status(model_directory=str(tmp_path))) == []
    assert resident_notes(recipe(kt_config={"backend": "auto"}), status(expert_format="int4_g32")) == []


def test_each_key_that_differs_is_a_line() -> None:
    other = recipe(
        cpu_infer=16,
        chunk_size=512,
        kt_weight_path=Path("/elsewhere"),
        kt_config={"backend": "AMXINT8_SFT", "model_max_length": 8192, "num_gpu_experts": 2},
    )
    lines = resident_notes(other, status())
    assert [line.split(": ")[1] for line in lines] == [
        "cpu_infer",
        "chunk_size",
        "kt_weight_path",
        "kt_config.backend",
        "kt_config.model_max_length",
        "kt_config.num_gpu_experts",
    ]
    assert lines[0] == (
        "recipe.yaml:7: cpu_infer: 16: the server has 32 expert threads (`kt-runtime serve --expert-threads`)"
    )
    assert lines[3].endswith("AMXINT8_SFT: the resident experts are bf16")
