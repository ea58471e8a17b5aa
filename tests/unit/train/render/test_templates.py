"""Named templates: LLaMA-Factory's renderings, honoured with one warning where the server renders otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.chat_templates import TEMPLATES as SERVED
from reference.chat_templates import assistant, system, user

from kt_runtime.errors import UnknownNameError
from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.train.data import Conversation, Preference
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.render.rendering import Renderer
from kt_runtime.train.templates.table import TEMPLATES
from kt_runtime.train.templates.tool_formats import DEFAULT

Make = Callable[..., Renderer]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TURNS = (user("Hi."), assistant("Hello!"), user("Who?"), assistant("Mara."))
EMPTY = "<think>\n\n</think>\n\n"
RENDERED = {  # of TURNS on DeepSeek's tokenizer, trained text between «»; LLaMA-Factory 0.9.5
    "alpaca": "Below is an instruction that describes a task. Write a response that appropriately completes the "
    f"request.\n\n### Instruction:\nHi.\n\n### Response:\n«Hello!{EOS}\n\n»### Instruction:\nWho?\n\n### Response:\n"
    f"«Mara.{EOS}\n\n»",
    "chatml": "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>\n»<|im_start|>user\nWho?"
    "<|im_end|>\n<|im_start|>assistant\n«Mara.<|im_end|>\n»",
    "deepseek": f"{BOS}User: Hi.\n\nAssistant:«Hello!{EOS}»User: Who?\n\nAssistant:«Mara.{EOS}»",
    "deepseek3": f"{BOS}<｜User｜>Hi.<｜Assistant｜>«Hello!{EOS}»<｜User｜>Who?<｜Assistant｜>«Mara.{EOS}»",
    "deepseekr1": f"{BOS}<｜User｜>Hi.<｜Assistant｜>«{EMPTY}Hello!{EOS}»<｜User｜>Who?<｜Assistant｜>"
    f"«{EMPTY}Mara.{EOS}»",
    "default": f"Human: Hi.{EOS}\nAssistant:«Hello!{EOS}\n»Human: Who?{EOS}\nAssistant:«Mara.{EOS}\n»",
    "empty": "Hi.«Hello!»Who?«Mara.»",
    "llama3": f"{BOS}<|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n«Hello!<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Mara.<|eot_id|>»",
    "moonlight": "<|im_system|>system<|im_middle|>You are a helpful assistant provided by Moonshot-AI.<|im_end|>"
    "<|im_user|>user<|im_middle|>Hi.<|im_end|><|im_assistant|>assistant<|im_middle|>«Hello!<|im_end|>»"
    "<|im_user|>user<|im_middle|>Who?<|im_end|><|im_assistant|>assistant<|im_middle|>«Mara.<|im_end|>»",
    "qwen": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>\n»<|im_start|>user\nWho?<|im_end|>\n"
    "<|im_start|>assistant\n«Mara.<|im_end|>\n»",
    "qwen3": f"<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n«{EMPTY}Hello!<|im_end|>\n»<|im_start|>user\n"
    f"Who?<|im_end|>\n<|im_start|>assistant\n«{EMPTY}Mara.<|im_end|>\n»",
    "qwen3_nothink": "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>\n»<|im_start|>user\n"
    "Who?<|im_end|>\n<|im_start|>assistant\n«Mara.<|im_end|>\n»",
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    directories: dict[str, Path] = {}

    def renderer(served: str, template: str | None, **keys: Any) -> Renderer:
        if served not in directories:
            preset, text = SERVED[served]
            directories[served] = path = tmp_path_factory.mktemp("tokenizer")
            write_tokenizer(path, load_preset(preset).config)
            if text is not None:
                values = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
                (path / "tokenizer_config.json").write_text(json.dumps({**values, "chat_template": text}), "utf-8")
        values = {"model_name_or_path": "m", "dataset": ("d",), "output_dir": Path("o"), "template": template}
        return Renderer(directories[served], Recipe(**{**values, "places": {"template": "r.yaml:7"}, **keys}))

    return renderer


def marked(renderer: Renderer, turns: Any = TURNS) -> str:
    item = renderer.render(Conversation(turns, None, "d.jsonl:1"))
    assert item is not None
    return renderer.marked(item)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_named_template_renders_as_llama_factory_does(make: Make, name: str) -> None:
    assert marked(make("deepseek-v3", name)) == RENDERED[name]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_slots_are_tokenised_one_by_one(make: Make, name: str) -> None:
    """As LLaMA-Factory does: an answer's tokens do not depend on what stands before and after it."""
    renderer = make("deepseek-v3", name)
    prompt, answer = renderer.prompt(TURNS[:-1]), renderer.tokenizer.encode("Mara.", add_special_tokens=False)
    item = renderer.render(Preference(TURNS[:-1], TURNS[-1], assistant("Nobody."), None, "p:1"))
    ids = item.chosen.ids.tolist()  # type: ignore[union-attr]
    assert ids[: len(prompt)] == prompt
    thought = renderer.tokenizer.encode(EMPTY) if TEMPLATES[name].reasoning else []
    end = renderer.tokenizer.encode(renderer.end or "")
    rest = ids[len(prompt) :]
    if TEMPLATES[name].assistant[0] == "{content}":
        assert rest[: len(thought + answer + end)] == thought + answer + end
    else:
        assert rest == thought + renderer.tokenizer.encode(TEMPLATES[name].assistant[0].format(content="Mara."))


def test_a_system_turn_replaces_the_templates_default(make: Make) -> None:
    renderer = make("deepseek-v3", "qwen")
    assert marked(renderer, (system("Be brief."), *TURNS[:2])).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert marked(make("deepseek-v3", "deepseek", default_system="Be kind."), TURNS[:2]) == (
        f"{BOS}Be kind.\n\nUser: Hi.\n\nAssistant:«Hello!{EOS}»"
    )


def test_reasoning_templates_keep_think_blocks_or_put_empty_ones_into_the_prompt(make: Make) -> None:
    turns = (user("Hi."), assistant("<think>\nhm\n</think>\n\nHello!"), user("Who?"), assistant("Mara."))
    assert "«<think>\nhm\n</think>\n\nHello!" in marked(make("qwen3", "qwen3"), turns)
    silent = make("qwen3", "qwen3", enable_thinking=False)
    assert marked(silent, turns) == RENDERED["qwen3"].replace(f"«{EMPTY}", f"{EMPTY}«")
    assert silent.tokenizer.decode(silent.prompt(turns[:3])).endswith(f"assistant\n{EMPTY}")
    assert "hm" not in silent.tokenizer.decode(silent.prompt(turns[:3]))
    for preserve in (False, True):
        renderer = make("qwen3", "qwen3", preserve_thinking=preserve)
        assert ("hm" in renderer.tokenizer.decode(renderer.prompt(turns[:3]))) is preserve


def test_mask_history_trains_the_last_answer_only(make: Make) -> None:
    assert marked(make("deepseek-v3", "deepseek3", mask_history=True)) == (
        f"{BOS}<｜User｜>Hi.<｜Assistant｜>Hello!{EOS}<｜User｜>Who?<｜Assistant｜>«Mara.{EOS}»"
    )


@pytest.mark.parametrize(
    ("served", "name"),
    [("deepseek-v3", None), ("deepseek-v3", "auto"), ("deepseek-v3", "deepseek3"), ("made qwen", "qwen3_nothink")],
)
def test_a_template_that_renders_as_the_server_does_is_not_mentioned(make: Make, served: str, name: str | None) -> None:
    assert make(served, name).comparison() is None


@pytest.mark.parametrize(
    ("served", "name", "ours", "theirs"),
    [
        ("deepseek-v3", "deepseek", "User: Hi.\\n\\nAssistant:", "<｜User｜>Hi.<｜Assistant｜>"),
        ("qwen3", "qwen3", "assistant\\n<think>\\n\\n</think>\\n\\nHello!", "assistant\\nHello!<|im_end|>"),
        ("qwen3", "qwen3_nothink", "assistant\\nHello!<|im_end|>", "assistant\\n<think>\\n\\n</think>\\n\\nHello!"),
        ("deepseek-r1", "deepseekr1", "<｜Assistant｜>'", "<｜Assistant｜><think>\\n'"),
    ],
)
def test_a_template_that_renders_otherwise_is_shown_with_the_servers(
    make: Make, served: str, name: str, ours: str, theirs: str
) -> None:
    warning = make(served, name).comparison()
    assert warning is not None
    heading, first, second = warning.splitlines()
    assert heading.startswith(f"r.yaml:7: template: {name}: ")
    assert ours in first and theirs in second


def test_an_end_that_is_no_token_of_the_model_is_said(make: Make) -> None:
    assert "'<|eot_id|>' is not a token of this model" in str(make("deepseek-v3", "llama3").comparison())


def test_an_unknown_name_is_refused_with_the_nearest(make: Make) -> None:
    with pytest.raises(UnknownNameError, match=r"r.yaml:7: unknown template 'deepseek_3'; did you mean 'deepseek3'\?"):
        make("deepseek-v3", "deepseek_3")


TIDE = {
    "name": "tide",
    "description": "When is it?",
    "parameters": {
        "type": "object",
        "properties": {
            "day": {"type": "integer", "description": "of the year"},
            "unit": {"type": "string", "enum": ["h", "min"]},
            "places": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["day"],
    },
}
TOOLS = (
    {"type": "function", "function": TIDE},
    {"type": "function", "function": {"name": "now", "description": "at once"}},
)
CALLS = [
    {"type": "function", "function": {"name": "tide", "arguments": {"day": 1, "unit": "é"}}},
    {"type": "function", "function": {"name": "now", "arguments": {}}},
]
TOOL_TURNS = (
    system("Be brief."),
    user("When?"),
    assistant("", tool_calls=CALLS),
    {"role": "tool", "content": "7"},
    assistant("At seven."),
)
DEFAULT_TOOLS = """You have access to the following tools:
> Tool Name: tide
Tool Description: When is it?
Tool Args:
  - day (integer, required): of the year
  - unit (string): , should be one of [h, min]
  - places (array): , where each item should be string

> Tool Name: now
Tool Description: at once
Tool Args:

Use the following format if using a tool:
```
Action: tool name (one of [tide, now])
Action Input: the input to the tool, in a JSON format representing the kwargs \
(e.g. ```{"input": "hello world", "num_beams": 5}```)
```
"""
DEFAULT_CALLS = 'Action: tide\nAction Input: {"day": 1, "unit": "é"}\nAction: now\nAction Input: {}'
QWEN_CALLS = (
    '<tool_call>\n{"name": "tide", "arguments": {"day": 1, "unit": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
QWEN_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>\n"
    f"{json.dumps(TOOLS[0])}\n{json.dumps(TOOLS[1])}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
WITH_TOOLS = {  # of TOOL_TURNS; LLaMA-Factory 0.9.5
    "deepseek3": f"{BOS}Be brief.{DEFAULT_TOOLS}<｜User｜>When?<｜Assistant｜>«{DEFAULT_CALLS}{EOS}»"
    f"<｜User｜>7<｜Assistant｜>«At seven.{EOS}»",
    "deepseekr1": f"{BOS}Be brief.{DEFAULT_TOOLS}<｜User｜>When?<｜Assistant｜>«{EMPTY}{DEFAULT_CALLS}{EOS}»<｜User｜>7"
    f"<｜Assistant｜>«{EMPTY}At seven.{EOS}»",
    "chatml": f"<|im_start|>system\nBe brief.{DEFAULT_TOOLS}<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>"
    f"assistant\n«{DEFAULT_CALLS}<|im_end|>\n»<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    "«At seven.<|im_end|>\n»",
    "qwen3_nothink": f"<|im_start|>system\nBe brief.{QWEN_TOOLS}<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
    f"<|im_start|>assistant\n«{QWEN_CALLS}<|im_end|>\n»<|im_start|>user\n<tool_response>\n7\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n«At seven.<|im_end|>\n»",
}


def marked_with_tools(renderer: Renderer, turns: Any = TOOL_TURNS) -> str:
    item = renderer.render(Conversation(turns, TOOLS, "d.jsonl:1"))
    assert item is not None
    return renderer.marked(item)


@pytest.mark.parametrize("name", list(WITH_TOOLS))
def test_tools_and_their_calls_are_rendered_as_llama_factory_does(make: Make, name: str) -> None:
    assert marked_with_tools(make("deepseek-v3", name)) == WITH_TOOLS[name]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_every_named_template_renders_tools_and_trains_calls_and_answers_only(make: Make, name: str) -> None:
    renderer = make("deepseek-v3", name, cutoff_len=4000)
    text = marked_with_tools(renderer)
    trained = [part.partition("»")[0] for part in text.split("«")[1:]]
    assert len(trained) == 2 and '"day": 1' in trained[0] and "At seven." in trained[1]
    assert "tide" in text.partition("«")[0] and "of the year" in text.partition("«")[0]
    assert marked_with_tools(renderer, TOOL_TURNS[1:]).partition("«")[0].count("of the year") == 1


def test_calls_keep_what_stands_before_them_and_answers_of_tools_are_one_turn(make: Make) -> None:
    thought = assistant("<think>\nhm\n</think>", tool_calls=CALLS[1:])
    outputs = ({"role": "tool", "content": "7"}, {"role": "tool", "content": "8"})
    text = marked_with_tools(make("deepseek-v3", "deepseekr1"), (user("When?"), thought, *outputs, assistant("At 7.")))
    assert "«<think>\nhm\n</think>\n\nAction: now\nAction Input: {}" in text
    assert "<｜User｜>7\n</tool_response>\n<tool_response>\n8<｜Assistant｜>" in text
    said = marked_with_tools(
        make("deepseek-v3", "deepseek3"), (user("When?"), assistant("Look:", tool_calls=CALLS[1:]))
    )
    assert said.endswith(f"«Look:\nAction: now\nAction Input: {{}}{EOS}»")


def test_a_prompt_with_tools_is_the_beginning_of_the_row(make: Make) -> None:
    renderer = make("deepseek-v3", "deepseek3")
    text = renderer.tokenizer.decode(renderer.prompt(TOOL_TURNS[:-1], TOOLS))
    assert text == WITH_TOOLS["deepseek3"].replace("«", "").replace("»", "").removesuffix(f"At seven.{EOS}")


@pytest.mark.parametrize("schema", [{"required": True}, {"required": 3}, {"enum": True}, {"items": 3}])
def test_a_tools_schema_that_is_none_renders_as_if_it_said_nothing(schema: Any) -> None:
    tool = {"name": "add", "description": "Adds.", "parameters": {"properties": {"a": schema}} | schema}
    assert "> Tool Name: add\nTool Description: Adds.\nTool Args:\n  - a (" in DEFAULT.tools([tool])
