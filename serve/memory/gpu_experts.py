"""`kt-runtime serve --gpu-experts` and `--stream-experts`: what of them is known before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.plan import format_bytes
from kt_runtime.serve.options.named import STREAMING, ServeOptions


def check_stream_experts(options: ServeOptions, *, with_gpu: bool) -> None:
    """Raises InvalidValueError for a number of tokens on a machine without a GPU."""
    if options.stream_experts not in STREAMING and not with_gpu:
        raise InvalidValueError(
            f"--stream-experts {options.stream_experts}: this machine has no GPU that experts could stream to; "
            "allowed are auto and off, which leave them to the CPU"
        )


def check_gpu_experts(options: ServeOptions, config: Mapping[str, Any], *, with_gpu: bool) -> None:
    """Raises InvalidValueError for a machine without a GPU, a size without room for one expert, or for the pinned
    experts, and for pinned experts without a size. `config`: the model's config.json."""
    pinned, size_bytes = options.pinned_experts, options.gpu_experts_bytes
    if not size_bytes:
        if any(pinned.values()):
            raise InvalidValueError(
                f"{options.placement}: gpu_experts needs room on the GPU: give it with --gpu-experts SIZE"
            )
        return
    if not with_gpu:
        raise InvalidValueError(
            f"--gpu-experts {format_bytes(size_bytes)}: this server has no GPU that could keep experts; leave it out"
        )
    import torch

    from kt_runtime.experts import ExpertShape
    from kt_runtime.experts.gpu.hot.placement import slots_by_layer
    from kt_runtime.experts.gpu.hot.set import slots_within

    family = family_for(config)
    shape = ExpertShape(*family.expert_shape(config))
    slots = slots_within(size_bytes, shape, getattr(torch, options.dtype))
    try:
        slots_by_layer(family.moe_layers(config), shape.num_experts, slots, pinned)
    except InvalidValueError as error:
        raise InvalidValueError(
            f"{options.placement}: {error}: raise --gpu-experts {format_bytes(size_bytes)}"
        ) from None
