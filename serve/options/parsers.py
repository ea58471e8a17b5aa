"""Selects SGLang's parsers for a model's tool calls and reasoning.

A preset names its parsers. For other checkpoints the chat template decides, since models of one architecture differ:
DeepSeek-V3, V3.1 and R1 have the same config, Qwen3-30B-A3B and Qwen3-Coder too. Markers come from the models' cards on
the hub; parser names from SGLang 0.5.23 (`function_call.parser_names`, `parser.reasoning_parser_names`).

A reasoning parser that a model does not need is worse than none: `deepseek-r1` treats the whole answer of DeepSeek-V3
as reasoning, since the model never writes `</think>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.families.registry import family_for
from kt_runtime.serve.models.hub_cache import repository_directory
from kt_runtime.serve.models.presets import Preset, load_preset, preset_names
from kt_runtime.sglang_patch.options import last_value

NONE = "none"
TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
LARGEST_TEMPLATE_BYTES = 16 << 20


@dataclass(frozen=True)
class Parsers:
    """None: no parser; the model's output is the answer."""

    tool_call: str | None = None
    reasoning: str | None = None


def parsers_for(
    config: Mapping[str, Any], directory: Path, preset: Preset | None, passed_on: Sequence[str] = ()
) -> Parsers:
    """`preset`: the one that the user named. `passed_on`: options for SGLang, which may name another template."""
    preset = preset or _preset_of(directory)
    if preset is not None:
        return Parsers(preset.tool_call_parser, preset.reasoning_parser)
    return from_template(config, chat_template(directory, passed_on))


def from_template(config: Mapping[str, Any], template: str) -> Parsers:
    """The parsers for this chat template and config; no tool parser for a template without tools."""
    family = family_for(config).name
    if family == "qwen3_moe":
        return Parsers(_qwen_tools(template), _qwen_reasoning(template))
    if family in ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"):
        return Parsers("glm45" if "<arg_key>" in template else None, "glm45" if "<think>" in template else None)
    if family == "minimax_m2":
        has_tools, thinks = "<minimax:tool_call>" in template, "<think>" in template
        return Parsers("minimax-m2" if has_tools else None, "minimax-append-think" if thinks else None)
    if family == "llama4_text":
        return Parsers("pythonic" if "<|python_start|>" in template else None)
    if family in ("mixtral", "olmoe"):
        return Parsers("mistral" if "[TOOL_CALLS]" in template else None)
    if "<|tool_calls_section_begin|>" in template or config.get("model_type") == "kimi_k2":
        return Parsers("kimi_k2", "kimi_k2" if "<think>" in template else None)
    return Parsers(_deepseek_tools(template), _deepseek_reasoning(template))


def chat_template(directory: Path, passed_on: Sequence[str] = ()) -> str:
    """The text of the checkpoint's chat template, or of the file that `--chat-template` names; empty: there is none."""
    if (named := last_value(passed_on, "--chat-template")) is not None:
        path = Path(named)
        return _read(path) if path.is_file() else ""
    if (directory / TEMPLATE_FILE).is_file():
        return _read(directory / TEMPLATE_FILE)
    try:
        found = json.loads(_read(directory / TOKENIZER_CONFIG) or "{}").get("chat_template")
    except (ValueError, AttributeError, RecursionError):
        return ""  # the tokenizer's loader reports errors in this file
    if isinstance(found, list):  # several named templates
        return "\n".join(str(item.get("template", "")) for item in found if isinstance(item, dict))
    return found if isinstance(found, str) else ""


def _qwen_tools(template: str) -> str | None:
    if "<function=" in template:
        return "qwen3_coder"
    return "qwen" if "<tool_call>" in template else None


def _qwen_reasoning(template: str) -> str | None:
    if "<think>" not in template:
        return None
    # Thinking-2507 always thinks: the template writes `<think>`, so the answer has only the closing tag.
    return "qwen3" if "enable_thinking" in template else "qwen3-thinking"


def _deepseek_tools(template: str) -> str | None:
    if "<｜tool▁calls▁begin｜>" not in template:
        return None
    return "deepseekv3" if "```json" in template else "deepseekv31"  # V3.1 writes arguments without a code block


def _deepseek_reasoning(template: str) -> str | None:
    if "<think>" not in template:
        return None
    return "deepseek-v3" if "thinking" in template else "deepseek-r1"  # V3.1's switch


def _preset_of(directory: Path) -> Preset | None:
    """The preset whose repository contains `directory`, in the Hugging Face cache; None if there is none."""
    repository = directory.parent.parent.name
    for name in preset_names():
        preset = load_preset(name)
        if any(repository == repository_directory(hub_id).name for hub_id in preset.hub_ids):
            return preset
    return None


def _read(path: Path) -> str:
    """The file's text; empty for a missing file, and for one larger than any template."""
    if not path.is_file() or path.stat().st_size > LARGEST_TEMPLATE_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")
