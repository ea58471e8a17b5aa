"""LLaMA-Factory's templates of the supported families, as data, for recipes that name one.

Recipes without a template name use the model's own chat template, as the server does. A named template renders as in
LLaMA-Factory 0.9.4 to 0.9.5: each slot is tokenised separately, and a reasoning template adds an empty think block to
every answer without one. Tools follow the system prompt, calls are part of an answer's text, and tool results are turns
of their own (`tool_formats`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.data.conversations import is_learnt
from kt_runtime.train.render.pieces import Messages, Piece, Tools
from kt_runtime.train.render.tool_formats import DEFAULT, LLAMA3, QWEN, ToolFormat

AUTO = "auto"
BOS, EOS, CONTENT = "{bos}", "{eos}", "{content}"

THINK, END_THINK = "<think>", "</think>"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_BETWEEN_OBSERVATIONS = "\n</tool_response>\n<tool_response>\n"  # in LLaMA-Factory's OpenAI rows, for every template
_THOUGHT = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Template:
    """Slots: text with `{content}` for the message's text, or the whole slot is `{bos}` or `{eos}`.

    `reasoning`: answers have a think block, an empty one where the data have none. `end`: the end of an answer.
    `observation`: the slot of a tool result, None: as a user's turn. `tools`: the format of tools and their calls.
    """

    user: tuple[str, ...]
    assistant: tuple[str, ...] = (CONTENT, EOS)
    system: tuple[str, ...] = (CONTENT,)
    prefix: tuple[str, ...] = ()
    default_system: str = ""
    reasoning: bool = False
    end: str = EOS
    observation: tuple[str, ...] | None = None
    tools: ToolFormat = DEFAULT


_CHATML_USER = ("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",)
_CHATML_ANSWER = ("{content}<|im_end|>\n",)
_CHATML_SYSTEM = ("<|im_start|>system\n{content}<|im_end|>\n",)
_QWEN_OBSERVATION = (
    "<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
_DEEPSEEK3_USER = ("<｜User｜>{content}<｜Assistant｜>",)


def _qwen(default_system: str = "", *, reasoning: bool = False) -> Template:
    return Template(
        user=_CHATML_USER,
        assistant=_CHATML_ANSWER,
        system=_CHATML_SYSTEM,
        default_system=default_system,
        reasoning=reasoning,
        end="<|im_end|>",
        observation=_QWEN_OBSERVATION,
        tools=QWEN,
    )


TEMPLATES: dict[str, Template] = {
    "alpaca": Template(
        user=("### Instruction:\n{content}\n\n### Response:\n",),
        assistant=(CONTENT, EOS, "\n\n"),
        default_system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
    ),
    "chatml": Template(
        user=_CHATML_USER,
        assistant=_CHATML_ANSWER,
        system=_CHATML_SYSTEM,
        end="<|im_end|>",
        observation=("<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n",),
    ),
    "deepseek": Template(user=("User: {content}\n\nAssistant:",), system=("{content}\n\n",), prefix=(BOS,)),
    "deepseek3": Template(user=_DEEPSEEK3_USER, prefix=(BOS,)),
    "deepseekr1": Template(user=_DEEPSEEK3_USER, prefix=(BOS,), reasoning=True),
    "default": Template(
        user=("Human: {content}", EOS, "\nAssistant:"),
        assistant=(CONTENT, EOS, "\n"),
        system=("System: {content}", EOS, "\n"),
    ),
    "empty": Template(user=(CONTENT,), assistant=(CONTENT,), end=""),
    "llama3": Template(
        user=(
            "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        assistant=("{content}<|eot_id|>",),
        system=("<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",),
        prefix=(BOS,),
        end="<|eot_id|>",
        observation=(
            "<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        tools=LLAMA3,
    ),
    "moonlight": Template(
        user=("<|im_user|>user<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>",),
        assistant=("{content}<|im_end|>",),
        system=("<|im_system|>system<|im_middle|>{content}<|im_end|>",),
        default_system="You are a helpful assistant provided by Moonshot-AI.",
        end="<|im_end|>",
    ),
    "qwen": _qwen("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _qwen(reasoning=True),
    "qwen3_nothink": _qwen(),
}


def named(name: str | None, where: str) -> Template | None:
    """None for the model's own chat template. Raises UnknownNameError with the nearest known name."""
    if name is None or name == AUTO:
        return None
    if name not in TEMPLATES:
        raise UnknownNameError("template", name, [AUTO, *TEMPLATES], where=where)
    return TEMPLATES[name]


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """Renders messages with a LLaMA-Factory template. `enable_thinking` None means True, LLaMA-Factory's default."""

    name: str
    template: Template
    bos: str
    eos: str
    enable_thinking: bool | None = None
    preserve_thinking: bool = False

    @property
    def end(self) -> str:
        return self.eos if self.template.end == EOS else self.template.end

    def conversation(self, messages: Messages, tools: Tools, where: str, *, last_only: bool) -> list[Piece]:
        messages = self._as_text(messages)
        if self._silent:
            messages = [_without_thought(message) for message in messages]
        pieces = self._opening(messages, tools)
        turns = _turns(messages)
        for number, message in enumerate(turns, start=1):
            turn = self._turn(message, where)
            learnt = is_learnt(message) and (number == len(turns) or not last_only)
            pieces += turn if learnt else [piece.none for piece in turn]
        return pieces

    def prompt(self, messages: Messages, tools: Tools, where: str) -> list[Piece]:
        """As LLaMA-Factory's chat and preferences: drops the reasoning of earlier turns unless it is preserved."""
        messages = self._as_text(messages)
        pieces = self._opening(messages, tools)
        for message in _turns(messages):
            if message["role"] == "assistant":
                forgets = self.template.reasoning and not self.preserve_thinking
                earlier = _without_thought(message) if forgets else message
                pieces += self._fill(self.template.assistant, earlier["content"])
            else:
                pieces += self._turn(message, where)
        return [*pieces, Piece(EMPTY_THOUGHT)] if self._silent else pieces

    def reply(
        self, messages: Messages, answer: dict[str, Any], tools: Tools, where: str
    ) -> tuple[list[Piece], list[Piece]]:
        (message,) = self._as_text([answer])
        message = _without_thought(message) if self._silent else message
        return self.prompt(messages, tools, where), [
            piece for piece in self._turn(message, where) if piece.num_answer_chars
        ]

    @property
    def _silent(self) -> bool:
        """Whether the empty think block belongs to the prompt instead of the answer."""
        return self.template.reasoning and self.enable_thinking is False

    def _turn(self, message: dict[str, Any], where: str) -> list[Piece]:
        if message["role"] == "user":
            return self._fill(self.template.user, message["content"])
        if message["role"] == "tool":
            return self._fill(self.template.observation or self.template.user, message["content"])
        if message["role"] != "assistant":
            raise InvalidValueError(
                f"{where}: template {self.name!r} has no {message['role']} turn after the first one"
            )
        answer = [piece.whole for piece in self._fill(self.template.assistant, message["content"])]
        if not self.template.reasoning or THINK in message["content"] or END_THINK in message["content"]:
            return answer
        thought = Piece(EMPTY_THOUGHT)
        return [thought if self._silent else thought.whole, *answer]

    def _as_text(self, messages: Messages) -> list[dict[str, Any]]:
        """Messages with calls written into their answer's text, and consecutive tool results joined into one turn."""
        turns: list[dict[str, Any]] = []
        for message in messages:
            if message.get("tool_calls"):
                weight = {"weight": message["weight"]} if "weight" in message else {}
                turns.append({"role": "assistant", "content": self._with_calls(message), **weight})
            elif message["role"] == "tool" and turns and turns[-1]["role"] == "tool":
                joined = _BETWEEN_OBSERVATIONS.join((turns[-1]["content"], message["content"]))
                turns[-1] = {"role": "tool", "content": joined}
            else:
                turns.append(message)
        return turns

    def _with_calls(self, message: dict[str, Any]) -> str:
        calls = self.template.tools.calls([call["function"] for call in message["tool_calls"]])
        before = message["content"].rstrip()
        if not before:
            return calls
        return f"{before}\n\n{calls}" if before.endswith(END_THINK) else f"{before}\n{calls}"

    def _opening(self, messages: Messages, tools: Tools) -> list[Piece]:
        given = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        system = given or self.template.default_system
        system += self.template.tools.tools([tool["function"] for tool in tools]) if tools else ""
        return self._fill(self.template.prefix, "") + (self._fill(self.template.system, system) if system else [])

    def _fill(self, slots: tuple[str, ...], content: str) -> list[Piece]:
        special = {BOS: self.bos, EOS: self.eos}
        texts = [special[slot] if slot in special else slot.replace(CONTENT, content) for slot in slots]
        return [Piece(text) for text in texts if text]


def _turns(messages: Messages) -> Messages:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _without_thought(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    return {**message, "content": _THOUGHT.sub("", message["content"]).lstrip("\n")}
