"""Named templates: LLaMA-Factory's renderings, honoured with one warning where the server renders otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.chat_templates import TEMPLATES as SERVED
from reference.chat_templates import assistant, system, user

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.serve.make_tokenizer import write_tokenizer
from kt_runtime.serve.presets import load_preset
from kt_runtime.train.data import Conversation, Preference
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.rendering import Renderer
from kt_runtime.train.templates import TEMPLATES

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


def test_tools_are_left_to_the_models_own_template(make: Make) -> None:
    renderer = make("qwen3", "qwen")
    with pytest.raises(InvalidValueError, match=r"d:3: template 'qwen' renders user and assistant turns only.*tool"):
        renderer.render(Conversation(TURNS, ({"type": "function"},), "d:3"))
    with pytest.raises(InvalidValueError, match="this row has a tool turn"):
        renderer.prompt([user("Hi."), {"role": "tool", "content": "7"}])
