"""Excerpts stand for the published templates: the markers are what the choice is made by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_runtime.serve.models.presets import load_preset, preset_names
from kt_runtime.serve.options.parsers import Parsers, chat_template, from_template, parsers_for

V3, QWEN, KIMI = (load_preset(name).config for name in ("DeepSeek-V3", "Qwen3-30B-A3B", "Kimi-K2"))
GLM, MIXTRAL, MINIMAX = (load_preset(name).config for name in ("GLM-4.5", "Mixtral-8x7B", "MiniMax-M2"))
TOOLS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        (V3, TOOLS + "function<｜tool▁sep｜>get\n```json\n{}", Parsers("deepseekv3", None)),
        (
            V3,
            TOOLS + "function<｜tool▁sep｜>get\n```json\n{}<｜Assistant｜><think>\n",
            Parsers("deepseekv3", "deepseek-r1"),
        ),
        (
            V3,
            TOOLS + "get<｜tool▁sep｜>{}{% if not thinking is defined %}<think>",
            Parsers("deepseekv31", "deepseek-v3"),
        ),
        (V3, "{{ messages }}", Parsers()),
        (QWEN, "<tool_call>{% if enable_thinking is defined %}<think>\n\n</think>", Parsers("qwen", "qwen3")),
        (QWEN, "<tool_call><|im_start|>assistant\n<think>\n", Parsers("qwen", "qwen3-thinking")),
        (QWEN, "<tool_call>", Parsers("qwen", None)),
        (QWEN, "<tool_call>\n<function=x><parameter=y>", Parsers("qwen3_coder", None)),
        (KIMI, "<|tool_calls_section_begin|>", Parsers("kimi_k2", None)),
        (GLM, "<tool_call>{name}\n<arg_key>{{ key }}</arg_key> <think></think>", Parsers("glm45", "glm45")),
        (GLM, "{{ messages }}", Parsers()),
        (MIXTRAL, "[TOOL_CALLS] [{{ tool_call }}]", Parsers("mistral", None)),
        (MIXTRAL, "[INST] {{ content }} [/INST]<think>", Parsers()),
        (MINIMAX, "<minimax:tool_call> ]~b]ai<think>", Parsers("minimax-m2", "minimax-append-think")),
        (MINIMAX, "{{ messages }}", Parsers()),
        (KIMI, "<|tool_calls_section_begin|><think>", Parsers("kimi_k2", "kimi_k2")),
    ],
)
def test_a_template_says_which_parsers_read_its_answers(config: dict, template: str, expected: Parsers) -> None:
    assert from_template(config, template) == expected


def test_presets_name_parsers_that_sglang_has_and_large_models_have_one() -> None:
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
    from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES

    named = {name: load_preset(name) for name in preset_names()}
    assert {preset.tool_call_parser for preset in named.values()} <= {None, *TOOL_CALL_PARSER_NAMES}
    assert {preset.reasoning_parser for preset in named.values()} <= {None, *REASONING_PARSER_NAMES}
    assert named["DeepSeek-V3"].tool_call_parser == "deepseekv3"
    assert (named["Qwen3-30B-A3B"].tool_call_parser, named["Qwen3-30B-A3B"].reasoning_parser) == ("qwen", "qwen3")
    assert named["Kimi-K2-Thinking"].reasoning_parser == "kimi_k2"


def test_every_name_that_a_template_can_give_is_sglangs() -> None:
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
    from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES

    assert {"qwen", "qwen3_coder", "deepseekv3", "deepseekv31", "kimi_k2"} <= set(TOOL_CALL_PARSER_NAMES)
    assert {"qwen3", "qwen3-thinking", "deepseek-r1", "deepseek-v3", "kimi_k2"} <= set(REASONING_PARSER_NAMES)


def test_the_template_is_found_where_checkpoints_have_it(tmp_path: Path) -> None:
    assert chat_template(tmp_path) == ""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "a", "template": "A"}]}))
    assert chat_template(tmp_path) == "A"
    (tmp_path / "chat_template.jinja").write_text("B")
    assert chat_template(tmp_path) == "B"
    (tmp_path / "mine.jinja").write_text("C")
    assert chat_template(tmp_path, ["--log-level", "info", f"--chat-template={tmp_path / 'mine.jinja'}"]) == "C"
    assert chat_template(tmp_path, ["--chat-template", "chatml"]) == ""


def test_a_broken_tokenizer_config_is_left_to_its_loader(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert parsers_for(QWEN, tmp_path, None) == Parsers()


def test_a_presets_repository_has_the_presets_parsers_under_its_own_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--moonshotai--Kimi-K2-Thinking" / "snapshots" / ("a" * 40)
    assert parsers_for(KIMI, snapshot, None) == Parsers("kimi_k2", "kimi_k2")
