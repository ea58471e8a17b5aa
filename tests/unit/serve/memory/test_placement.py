"""KTransformers' rule files: what they place is taken, the rest is a line or an error, and nothing is imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.errors import InvalidValueError, NotFoundError, UserError
from kt_runtime.serve.memory import placement_names as known
from kt_runtime.serve.memory.placement import Placement, module_names, read_placement
from kt_runtime.serve.models.presets import load_preset

SEED = """\
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts     # custom MoE Kernel with expert parallelism
    kwargs:
      prefill_device: "cpu"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KSFTExpertsCPU"
      out_device: "cuda"
      backend: "AMXInt8" # or "AMXBF16" or "llamafile" (default)
"""

# Rules as in the shipped multi-GPU files, on the four layers of the tiny model.
TWO_GPUS = """\
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs:
      generate_device: "cpu"
      prefill_device: "cpu"
- match:
    name: "^model\\\\.layers\\\\.([01])\\\\.(?!self_attn\\\\.kv_b_proj).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda:0"
      prefill_device: "cuda:0"
      generate_op: "KLinearMarlin"
      prefill_op: "KLinearTorch"
- match:
    name: "^model\\\\.layers\\\\.([23])\\\\.(?!self_attn\\\\.kv_b_proj).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda:1"
      prefill_device: "cuda:1"
      generate_op: "KLinearMarlin"
      prefill_op: None
- match:
    class: ktransformers.models.modeling_deepseek_v3.MoEGate
  replace:
    class: ktransformers.operators.gate.KMoEGate
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda:1"
      backend: "AMXBF16"
  recursive: False
- match:
    name: "^model$"
  replace:
    class: ktransformers.operators.models.KDeepseekV2Model
    kwargs:
      per_layer_prefill_intput_threshold: 0
      absorb_for_prefill: False
      transfer_map:
        2: "cuda:1"
- match:
    name: "^model\\\\.layers\\\\..*\\\\."
  replace:
    class: default
    kwargs:
      generate_device: cuda
"""


@pytest.fixture(scope="module")
def modules() -> list[str]:
    return module_names(load_preset("tiny-deepseek-v3").config)


def read(tmp_path: Path, text: str, modules: list[str] | None) -> Placement:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return read_placement(path, modules)


def test_the_seeds_file_places_int8_experts_on_the_cpu(tmp_path: Path, modules: list[str]) -> None:
    for names in (modules, None, module_names(load_preset("DeepSeek-V3").config)):
        placement = read(tmp_path, SEED, names)
        assert (placement.expert_format, placement.num_devices, placement.expert_isa) == ("int8", 1, "amx")
        assert placement.notes == ()


def test_what_has_no_equivalent_is_one_line_each(tmp_path: Path, modules: list[str]) -> None:
    placement = read(tmp_path, TWO_GPUS, modules)
    path = tmp_path / "rules.yaml"
    assert (placement.expert_format, placement.num_devices) == ("bf16", 2)
    assert placement.notes == (
        f"{path}:6: embeddings on the CPU have no equivalent: they are on the server's device",
        f"{path}:16: KLinearMarlin: the format of attention and shared weights is the checkpoint's (2 rules)",
        f"{path}: spreads layers over 2 GPUs: kt-runtime serves on one device",
    )


def test_a_gpu_that_is_not_there_is_told_with_its_line(tmp_path: Path, modules: list[str]) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(TWO_GPUS)
    assert read_placement(path, modules, num_gpus=2).num_devices == 2
    with pytest.raises(InvalidValueError) as refused:
        read_placement(path, modules, num_gpus=1)
    lines = [number for number, line in enumerate(TWO_GPUS.splitlines(), 1) if "cuda:1" in line]
    assert lines and all(f"{path}:{line}: " in str(refused.value) for line in lines)
    assert str(refused.value).count("cuda:1 is not there: this machine has cuda:0") == len(lines)


def rule(name: str, cls: str, **kwargs: str) -> str:
    lines = [f"- match: {{name: '{name}'}}", f"  replace:\n    class: ktransformers.operators.{cls}\n    kwargs:"]
    return "\n".join([*lines, *(f"      {key}: {value}" for key, value in kwargs.items())]) + "\n"


def test_the_first_rule_that_matches_experts_holds(tmp_path: Path, modules: list[str]) -> None:
    experts = "experts.KTransformersExperts"
    first = rule("experts$", experts, backend="llamafile")
    assert read(tmp_path, first + rule("experts$", experts, backend="AMXInt8"), modules).expert_format is None
    mixed = read(
        tmp_path,
        rule("layers\\.1\\..*experts$", experts, backend="AMXInt8") + rule("experts$", experts, backend="AMXBF16"),
        modules,
    )
    assert mixed.expert_format == "int8"
    assert "layers ask for several expert formats (int8, bf16): the first holds for all" in mixed.notes[0]
    marlin = rule("experts$", experts, generate_op="KExpertsMarlin", generate_device="cuda")
    assert "experts on the GPU in some layers have no equivalent" in read(tmp_path, marlin, modules).notes[0]
    none = read(tmp_path, rule("self_attn$", "attention.KDeepseekV2Attention"), modules)
    assert "no rule places the routed experts" in none.notes[0]


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("a: b\n", 1, "a placement file is a list of rules"),
        ("- x\n", 1, "a rule is a mapping with match and replace"),
        ("- match: {}\n  replace: {class: default}\n", 1, "match: .*: needs a name, a class or both"),
        ("- replace: {class: default}\n", 1, "match: must be a mapping"),
        ("- match: {name: lm_head}\n  replace: {}\n", 2, "replace: class is missing"),
        ("- match: {name: lm_head, nam: x}\n  replace: {class: default}\n", 1, "unknown key nam; did you mean 'name'"),
        ("- match: {name: '('}\n  replace: {class: default}\n", 1, "name: '\\(': is not a regular expression: missing"),
        ("- match: {name: 3}\n  replace: {class: default}\n", 1, "name: 3: must be a regular expression"),
        ("- match:\n    name: layers\\.99\\.\n  replace: {class: default}\n", 2, "matches no module of the model"),
        ("- match: {class: torch.nn.Linea}\n  replace: {class: default}\n", 1, "did you mean 'torch.nn.Linear'"),
        ("- match: {name: lm_head}\n  replace: {class: os.system}\n", 2, "class: 'os.system': unknown class"),
        (
            rule("experts$", "experts.KTransformersExpert"),
            3,
            "unknown class; did you mean 'ktransformers.operators.experts.KTransformersExperts'",
        ),
        (rule("experts$", "experts.KTransformersExperts", generate_op="KExpertCPU"), 5, "did you mean 'KExpertsCPU'"),
        (
            rule("experts$", "experts.KTransformersExperts", generate_device="cpu:0"),
            5,
            "unknown device; did you mean 'cpu'",
        ),
        (rule("experts$", "experts.KTransformersExperts", backend="AMXINT8"), 5, "unknown backend"),
        (
            rule("experts$", "experts.KTransformersExperts", bakend="AMXInt8"),
            5,
            "unknown key bakend; did you mean 'backend'",
        ),
        (rule("experts$", "experts.KTransformersExperts", generate_device="npu:0"), 5, "Ascend NPUs are not supported"),
        (rule("mlp$", "linear.KTransformersLinear", generate_op="KLinearIPEXLLM"), 5, "Intel XPUs are not supported"),
        (rule("mlp$", "ascend.ascend_mlp.KDeepseekV3MLPW8A8A2V1"), 3, "Ascend NPUs are not supported"),
        (rule("^model$", "models.KDeepseekV2Model", transfer_map="[1]"), 5, "must be a mapping of layers to devices"),
        (rule("^model$", "models.KDeepseekV2Model", transfer_map="{1: gpu}"), 5, "unknown device"),
        (rule("self_attn$", "attention.KDeepseekV2Attention", absorb_for_prefill="maybe"), 5, "must be true or false"),
        ("- match: {name: lm_head}\n  recursive: 1\n  replace: {class: default}\n", 2, "recursive: 1: must be true"),
        ("- match: {name: lm_head}\n  replace: {class: !!python/name:os.system ''}\n", 2, "the tag .* is not allowed"),
    ],
)
def test_a_broken_rule_is_named_with_its_line(
    tmp_path: Path, modules: list[str], text: str, line: int, expected: str
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path, text, modules)
    assert re.search(rf"rules.yaml:{line}: .*{expected}", str(caught.value)), str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path, modules: list[str]) -> None:
    with pytest.raises(InvalidValueError, match=r"rules.yaml: 4 problems"):
        read(
            tmp_path,
            rule("nowhere", "experts.KTransformersExperts", generate_device="tpu", backend="AMX", other="1"),
            modules,
        )
    with pytest.raises(NotFoundError, match=r"none.yaml: no such placement file"):
        read_placement(tmp_path / "none.yaml", None)


def test_names_are_data_and_never_imported(tmp_path: Path, modules: list[str]) -> None:
    assert len(known.REPLACEMENTS) == 67
    before = set(sys.modules)
    read(tmp_path, TWO_GPUS, modules)
    assert not any(name.startswith("ktransformers") for name in set(sys.modules) - before)


def test_module_names_are_those_of_transformers_4(modules: list[str]) -> None:
    assert {
        "model",
        "lm_head",
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "model.layers.1.self_attn.kv_b_proj",
        "model.layers.1.self_attn.rotary_emb",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.experts.0.up_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
    } <= set(modules)


_WORDS = st.sampled_from(
    ["match", "replace", "name", "class", "kwargs", "default", "cuda:1", "cpu", "backend", "AMXInt8", "experts$", "("]
)
_TREES = st.recursive(
    _WORDS | st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules=st.lists(st.fixed_dictionaries({"match": _TREES, "replace": _TREES}) | _TREES, max_size=3) | st.binary())
def test_any_file_ends_in_a_placement_or_a_user_error(tmp_path: Path, modules: list[str], rules: object) -> None:
    import yaml

    path = tmp_path / "rules.yaml"
    path.write_bytes(rules if isinstance(rules, bytes) else yaml.safe_dump(rules).encode())
    try:
        read_placement(path, modules)
    except UserError as error:
        assert str(error)


# Experts that are pinned to the device.


PINS = """\
- gpu_experts:
    1: [0, 5]
    2: []
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      backend: "AMXInt8"
"""


def test_experts_are_pinned_beside_the_rules(tmp_path: Path, modules: list[str]) -> None:
    placement = read(tmp_path, PINS, modules)
    assert (placement.pinned_experts, placement.expert_format) == ({1: (0, 5), 2: ()}, "int8")
    assert read(tmp_path, SEED, modules).pinned_experts == {}


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("- gpu_experts: 3\n", 1, "gpu_experts: 3: must be a mapping of layers to experts"),
        ("- gpu_experts:\n    first: [0]\n", 2, "gpu_experts: 'first' is no layer; allowed are whole numbers"),
        ("- gpu_experts:\n    1: 4\n", 2, "gpu_experts: layer 1: 4: must be a list of experts, whole numbers from 0"),
        ("- gpu_experts:\n    1: [0, x]\n", 2, "gpu_experts: layer 1: [0, 'x']: must be a list of experts"),
        ("- gpu_experts:\n    1: [true]\n", 2, "gpu_experts: layer 1: [True]: must be a list of experts"),
        ("- gpu_experts:\n    1: [-1]\n", 2, "gpu_experts: layer 1: [-1]: must be a list of experts"),
        ("- gpu_experts:\n    1: [2, 2]\n", 2, "gpu_experts: layer 1: expert 2 is listed twice"),
        ("- gpu_experts:\n    1: [0]\n    1: [2]\n", 3, "1 stands at"),
        ("- gpu_experts: {}\n- gpu_experts: {}\n", 2, "gpu_experts stands at"),
        ("- gpu_experts: {}\n  match: {}\n", 2, "match: gpu_experts is an item of its own"),
    ],
)
def test_a_wrong_pin_is_an_error_with_its_line(
    tmp_path: Path, modules: list[str], text: str, line: int, problem: str
) -> None:
    for names in (modules, None):
        with pytest.raises(InvalidValueError) as raised:
            read(tmp_path, text, names)
        assert f"{tmp_path / 'rules.yaml'}:{line}: {problem}" in str(raised.value)


def test_pins_of_layers_and_experts_that_the_model_lacks_are_errors(tmp_path: Path, modules: list[str]) -> None:
    with pytest.raises(InvalidValueError) as raised:
        read(tmp_path, "- gpu_experts:\n    0: [1]\n    2: [4096]\n", modules)
    path = tmp_path / "rules.yaml"
    assert f"{path}:2: gpu_experts: layer 0 has no routed experts; those that have: 1 to 2" in str(raised.value)
    assert re.search(rf"{path}:3: gpu_experts: layer 2: expert 4096: allowed are 0 to 7$", str(raised.value), re.M)
