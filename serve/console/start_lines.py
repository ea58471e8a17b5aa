"""The lines that a server prints before it loads anything: the model, its weight formats, its memory need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kt_runtime.serve.memory.plan import MemoryPlan, expert_formats, format_bytes
from kt_runtime.serve.models.checkpoint import count_parameters, format_count
from kt_runtime.serve.models.report import ResolvedModel
from kt_runtime.serve.options.named import ServeOptions

TYPE_NAMES = {"F16": "float16", "F32": "float32"}
"""Names of types for people, by safetensors' names."""


def describe_model(
    options: ServeOptions, model: ResolvedModel, plan: MemoryPlan, available_bytes: Mapping[str, int]
) -> Iterator[str]:
    counts = count_parameters(model.config)
    _, held = expert_formats(model.config, options.expert_format)
    yield (
        f"model {model.name}: {model.family.name}, {format_count(counts.total)} parameters "
        f"({format_count(counts.active)} active), experts in {held.name}, from {model.directory}"
    )
    yield from _conversions(options, model, held.name)
    for device in plan.devices():
        need, there = format_bytes(plan.total_bytes(device)), format_bytes(available_bytes.get(device, 0))
        yield f"memory on the {device.upper()}: {need} needed, {there} free"
    yield f"parsers: tool calls {options.tool_call_parser}, reasoning {options.reasoning_parser}"


def _conversions(options: ServeOptions, model: ResolvedModel, held: str) -> Iterator[str]:
    """What becomes of weights that are wider than bf16, or float16: nothing for a checkpoint in bf16."""
    types = model.types
    if types is None:
        return
    parts = []
    if dense := _named(types.dense - {"BF16"}):
        same = dense == options.dtype
        parts.append(f"attention and dense weights {'stay' if same else 'are converted from ' + dense + ' to'} ")
        parts[-1] += options.dtype
    if experts := _named(types.experts - {"BF16"}):
        quantized = "" if held == "bf16" else f" and quantized to {held}"
        parts.append(f"routed experts are rounded from {experts} to bfloat16{quantized}")
    if parts:
        yield f"weights: {'; '.join(parts)}"


def _named(dtypes: frozenset[str]) -> str:
    return " and ".join(TYPE_NAMES[dtype] for dtype in sorted(dtypes))
