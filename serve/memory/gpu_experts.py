"""`kt-runtime serve --gpu-experts` and `--stream-experts`: what of them is known before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for, gguf
from kt_runtime.families.quantization import GgufExperts
from kt_runtime.serve.memory.plan import expert_formats, format_bytes
from kt_runtime.serve.options.named import STREAMING, ServeOptions

if TYPE_CHECKING:
    from kt_runtime.experts.gpu.hot.slots import Form


def only_on_cpu(config: Mapping[str, Any]) -> str:
    """Why no GPU computes the routed experts of the model; empty: one may."""
    family, mlp = family_for(config), family_for(config).expert_mlp(config)
    if mlp.is_plain:
        return ""
    biases = " and biases" if mlp.has_bias else ""
    return f"the experts of {family.name} have the activation {mlp.activation!r}{biases}, which the CPU alone computes"


def check_only_on_cpu(options: ServeOptions, config: Mapping[str, Any]) -> None:
    """Raises InvalidValueError for experts that shall be on the GPU, or stream to it, and can't be computed there."""
    reason = only_on_cpu(config)
    if not reason:
        return
    if options.gpu_experts_bytes:
        raise InvalidValueError(f"--gpu-experts {format_bytes(options.gpu_experts_bytes)}: {reason}; leave it out")
    if any(options.pinned_experts.values()):
        raise InvalidValueError(f"{options.placement}: gpu_experts: {reason}; leave it out")
    if options.stream_experts not in STREAMING:
        raise InvalidValueError(
            f"--stream-experts {options.stream_experts}: {reason}; allowed are auto and off, which leave them to it"
        )


def check_stream_experts(options: ServeOptions, *, with_gpu: bool) -> None:
    """Raises InvalidValueError for a number of tokens on a machine without a GPU."""
    if options.stream_experts not in STREAMING and not with_gpu:
        raise InvalidValueError(
            f"--stream-experts {options.stream_experts}: this machine has no GPU that experts could stream to; "
            "allowed are auto and off, which leave them to the CPU"
        )


def check_gpu_experts(options: ServeOptions, config: Mapping[str, Any], *, with_gpu: bool) -> None:
    """Raises InvalidValueError for a machine without a GPU, a size without room for one expert, or for the pinned
    experts, for pinned experts without a size, and for a published format that the GPU can't dequantize. `config`: the
    model's config.json."""
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
    from kt_runtime.experts.gpu.hot.set import slots_within
    from kt_runtime.experts.gpu.hot.slots import slot_bytes

    shape = ExpertShape(*family_for(config).expert_shape(config))
    sizes = slot_bytes(shape, getattr(torch, options.dtype), _form(options, config), _held_formats(options, config))
    slots_within(size_bytes, sizes, shape.num_experts, {})
    try:
        slots_within(size_bytes, sizes, shape.num_experts, pinned)
    except InvalidValueError as error:
        raise InvalidValueError(
            f"{options.placement}: {error}: raise --gpu-experts {format_bytes(size_bytes)}"
        ) from None


def hot_scratch_bytes(options: ServeOptions, config: Mapping[str, Any]) -> int:
    """Bytes of GPU memory for the dequantized weights of hot experts that are held as published."""
    import torch

    from kt_runtime.experts import ExpertShape
    from kt_runtime.experts.gpu.hot.slots import scratch_bytes

    if _form(options, config) == "model":
        return 0
    return scratch_bytes(ExpertShape(*family_for(config).expert_shape(config)), getattr(torch, options.dtype))


def _form(options: ServeOptions, config: Mapping[str, Any]) -> Form:
    from kt_runtime.experts.gpu.hot.slots import chosen_form

    return chosen_form(options.gpu_experts_format, _held_formats(options, config))


def _held_formats(options: ServeOptions, config: Mapping[str, Any]) -> dict[int, str]:
    """Layer -> the format in which the store will hold its experts (`ExpertLayer.format`)."""
    layers, held = family_for(config).moe_layers(config), expert_formats(config, options.expert_format)[1]
    if not isinstance(held, GgufExperts):
        return dict.fromkeys(layers, held.name)
    names = [(gguf.packed_name(up), gguf.packed_name(down)) for up, down in held.types]
    return {layer: up if up == down else f"{up}+{down}" for layer, (up, down) in zip(layers, names, strict=True)}
