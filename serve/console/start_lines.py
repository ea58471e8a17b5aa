"""The lines that a server prints before it loads anything: the model, its weight formats, its memory need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kt_runtime.serve.memory.plan import MemoryPlan, expert_formats, format_bytes
from kt_runtime.serve.models.checkpoint import count_parameters, format_count
from kt_runtime.serve.models.report import ResolvedModel
from kt_runtime.serve.options.named import ServeOptions


def describe_model(
    options: ServeOptions, model: ResolvedModel, plan: MemoryPlan, available_bytes: Mapping[str, int]
) -> Iterator[str]:
    counts = count_parameters(model.config)
    _, held = expert_formats(model.config, options.expert_format)
    yield (
        f"model {model.name}: {model.family.name}, {format_count(counts.total)} parameters "
        f"({format_count(counts.active)} active), experts in {held.name}, from {model.directory}"
    )
    for device in plan.devices():
        need, there = format_bytes(plan.total_bytes(device)), format_bytes(available_bytes.get(device, 0))
        yield f"memory on the {device.upper()}: {need} needed, {there} free"
    yield f"parsers: tool calls {options.tool_call_parser}, reasoning {options.reasoning_parser}"
