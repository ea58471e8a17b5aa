"""The model families for people: what each is, which presets it has, and how it was verified.

`CHECKS` hold for every family: a test (tests/unit/serve/models/test_families.py) fails for a family that one of them
does not run on. `FORMAT_CHECKS` hold for every format of routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kt_runtime.families.base import Family
from kt_runtime.families.registry import FAMILIES
from kt_runtime.families.wrapped import WRAPPERS
from kt_runtime.serve.models.presets import load_preset, preset_names


@dataclass(frozen=True, slots=True)
class Check:
    """`claim`: what was shown. `tests`: where."""

    name: str
    claim: str
    tests: str


CHECKS = (
    Check(
        "served",
        "log-probabilities equal Hugging Face's in float32, from a checkpoint that transformers wrote",
        "tests/unit/sglang_patch/test_families.py",
    ),
    Check(
        "trained",
        "log-probabilities in training equal the served ones to the bit, also with an adapter on every module",
        "tests/unit/sglang_patch/test_families.py",
    ),
    Check(
        "native step",
        "hidden states and keys equal those of SGLang's modules to the bit",
        "tests/reference/resident/native_step.py",
    ),
    Check("gradients", "equal autograd's in Hugging Face's model", "tests/unit/resident/conftest.py"),
    Check("adapters", "PEFT loads what is written and computes the same", "tests/unit/adapters/conftest.py"),
    Check("server", "a real server answers, and trains the routed experts in place", "tests/system"),
)

FORMAT_CHECKS = (
    Check(
        "served",
        "in float32 log-probabilities equal Hugging Face's with the dequantized weights",
        "tests/unit/sglang_patch/cpu/test_expert_formats.py",
    ),
    Check(
        "trained",
        "in float32 and bfloat16 log-probabilities in training equal the served ones to the bit, also with an adapter",
        "tests/unit/sglang_patch/cpu/test_expert_formats.py",
    ),
    Check(
        "linear layers",
        "of GGUF files: products and gradients equal those of the dequantized weights",
        "tests/unit/experts/quantized/test_packed_linears.py",
    ),
    Check(
        "gradients",
        "forward and backward equal the float64 reference's on the dequantized weights, on each instruction set",
        "tests/unit/experts/quantized",
    ),
)


def family_rows() -> list[dict[str, Any]]:
    """One row for each family, for `kt-runtime models families`."""
    presets: dict[str, list[str]] = {}
    for name in preset_names():
        config = load_preset(name).config
        for family in FAMILIES:
            if set(config["architectures"]) & set(family.architectures):
                presets.setdefault(family.name, []).append(name)
    return [_row(family, presets.get(family.name, [])) for family in FAMILIES]


def _row(family: Family, presets: list[str]) -> dict[str, Any]:
    traits = family.traits
    wrappers = [wrapper.architecture for wrapper in WRAPPERS if wrapper.inner in family.architectures]
    kinds = [
        name
        for name, has in (("dense first layers", traits.dense_first_layers), ("shared", traits.shared_experts))
        if has
    ]
    return {
        "family": family.name,
        "architectures": [*family.architectures, *wrappers],
        "model_types": list(family.model_types),
        "attention": traits.attention,
        "router": traits.router,
        "experts": ", ".join([*kinds, "routed"]),
        "presets": presets,
        "verified": {check.name: check.claim for check in CHECKS},
    }
