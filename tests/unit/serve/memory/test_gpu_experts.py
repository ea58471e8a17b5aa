"""`--gpu-experts` and `--stream-experts` are refused, with the numbers, where they can't do what they are asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.experts import ExpertShape
from kt_runtime.experts.gpu.hot.slots import slot_bytes
from kt_runtime.families import family_for
from kt_runtime.serve.exactness import check_exact
from kt_runtime.serve.memory.gpu_experts import (
    check_gpu_experts,
    check_only_on_cpu,
    check_stream_experts,
    only_on_cpu,
)
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.named import ServeOptions

CONFIG = load_preset("tiny-deepseek-v3").config
_, HIDDEN, INNER = family_for(CONFIG).expert_shape(CONFIG)
EXPERT = 3 * HIDDEN * INNER * 2


def check(*, with_gpu: bool = True, **options: Any) -> None:
    check_gpu_experts(ServeOptions(model="m", placement=Path("pins.yaml"), **options), CONFIG, with_gpu=with_gpu)


def test_sizes_that_fit_are_accepted() -> None:
    check()
    check(with_gpu=False)
    check(gpu_experts_bytes=3 * EXPERT)
    check(gpu_experts_bytes=6 * EXPERT, dtype="float32")
    check(gpu_experts_bytes=5 * EXPERT, pinned_experts={1: (0, 2), 2: (7,)})
    check(gpu_experts_bytes=1 << 50)


def test_published_experts_are_counted_in_their_own_bytes() -> None:
    """Of a bf16 checkpoint that is quantized while it is read, and of each layer of a GGUF file."""
    shape = ExpertShape(*family_for(CONFIG).expert_shape(CONFIG))
    of_int4 = slot_bytes(shape, torch.bfloat16, "published", {1: "int4_g32"})[1]
    assert of_int4 < EXPERT / 3
    for asked in ("auto", "published"):
        check(gpu_experts_bytes=3 * of_int4, expert_format="int4", gpu_experts_format=asked)
        with pytest.raises(InvalidValueError, match=f"allowed: {3 * of_int4} bytes or more"):
            check(gpu_experts_bytes=3 * of_int4 - 1, expert_format="int4", gpu_experts_format=asked)
    with pytest.raises(InvalidValueError, match=f"allowed: {3 * EXPERT} bytes or more"):
        check(gpu_experts_bytes=3 * of_int4, expert_format="int4", gpu_experts_format="model")

    types = [["Q4_K", "Q6_K"], ["Q4_K", "Q4_K"]]
    config = {**CONFIG, "quantization_config": {"quant_method": "gguf", "files": ["m.gguf"], "experts": types}}
    layers = family_for(CONFIG).moe_layers(CONFIG)
    assert len(layers) == 2
    formats = {layers[0]: "int4k_g32+int6k_g16", layers[1]: "int4k_g32"}
    sizes = slot_bytes(shape, torch.bfloat16, "published", formats)
    options = ServeOptions(model="m", gpu_experts_bytes=3 * sizes[layers[0]] - 1)
    with pytest.raises(InvalidValueError, match=f"an expert has {sizes[layers[1]]}, and 2 buffers of"):
        check_gpu_experts(dataclasses.replace(options, gpu_experts_bytes=9), config, with_gpu=True)
    check_gpu_experts(options, config, with_gpu=True)


def test_a_form_needs_experts_on_the_gpu_and_a_known_name() -> None:
    with pytest.raises(InvalidValueError, match="--gpu-experts-format published: no experts are kept on the GPU"):
        ServeOptions(model="m", gpu_experts_format="published")
    with pytest.raises(UnknownNameError, match=r"--gpu-experts-format.*modle.*model"):
        ServeOptions(model="m", gpu_experts_bytes=1, gpu_experts_format=cast("Any", "modle"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_experts_bytes": 1 << 30},
            "--gpu-experts 1.*GiB: the experts of gpt_oss have the activation 'swigluoai'",
        ),
        (
            {"pinned_experts": {1: (0,)}},
            "pins.yaml: gpu_experts: the experts of gpt_oss .* biases, which the CPU alone",
        ),
        ({"stream_experts": "256"}, "--stream-experts 256: the experts of gpt_oss .* allowed are auto and off"),
    ],
)
def test_experts_that_no_gpu_computes_are_refused_there_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    gpt_oss, plain = load_preset("tiny-gpt-oss").config, load_preset("tiny-mixtral").config
    assert only_on_cpu(gpt_oss) and not only_on_cpu(plain)
    asked = ServeOptions(model="m", placement=Path("pins.yaml"), **options)
    check_only_on_cpu(asked, plain)
    check_only_on_cpu(ServeOptions(model="m"), gpt_oss)
    with pytest.raises(InvalidValueError, match=message):
        check_only_on_cpu(asked, gpt_oss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_experts_bytes": 1 << 30, "with_gpu": False}, "--gpu-experts 1.*GiB: this server has no GPU"),
        ({"gpu_experts_bytes": 3 * EXPERT - 1}, f"has no room for one expert; allowed: {3 * EXPERT} bytes or more"),
        ({"gpu_experts_bytes": 3 * EXPERT, "dtype": "float32"}, f"allowed: {6 * EXPERT} bytes"),
        (
            {"pinned_experts": {1: (0,)}},
            "pins.yaml: gpu_experts needs room on the GPU: give it with --gpu-experts SIZE",
        ),
        (
            {"gpu_experts_bytes": 4 * EXPERT, "pinned_experts": {1: (0, 2), 2: (7,)}},
            "pins.yaml: 3 experts are pinned to the device, which has room for 2: raise --gpu-experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        check(**options)


def test_hot_experts_and_exact_exclude_each_other() -> None:
    check_exact(ServeOptions(model="m", gpu_experts_bytes=1 << 30), CONFIG)
    with pytest.raises(InvalidValueError, match="--exact and --gpu-experts exclude each other: experts on the device"):
        check_exact(ServeOptions(model="m", gpu_experts_bytes=1 << 30, exact=True), CONFIG)
    with pytest.raises(InvalidValueError, match="--gpu-experts -1: must be at least 0"):
        ServeOptions(model="m", gpu_experts_bytes=-1)


@pytest.mark.parametrize(("value", "found"), [("auto", "auto"), ("off", "off"), ("1", 1), ("4096", 4096)])
def test_experts_stream_by_a_number_of_tokens_where_there_is_a_gpu(value: str, found: str | int) -> None:
    options = ServeOptions(model="m", stream_experts=value)
    assert options.streaming == found
    check_stream_experts(options, with_gpu=True)
    if isinstance(found, str):
        check_stream_experts(options, with_gpu=False)
        return
    with pytest.raises(InvalidValueError, match=f"--stream-experts {value}: this machine has no GPU .* auto and off"):
        check_stream_experts(options, with_gpu=False)


@pytest.mark.parametrize("value", ["", "on", "0", "-1", "1.5", "1e3", "AUTO", "9999999999"])
def test_other_values_of_stream_experts_are_refused(value: str) -> None:
    with pytest.raises(InvalidValueError, match="allowed are auto, off, or a number of tokens, 1 or more"):
        ServeOptions(model="m", stream_experts=value)
