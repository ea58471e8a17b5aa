"""Finds the answers in a conversation that a chat template has rendered.

An answer begins at the end of its prompt: the messages before it, rendered with the generation prompt. It ends where
the rendered conversation up to and including it ends. Templates of reasoning models render an answer differently once
it is history (Qwen3 and DeepSeek drop its think block), so earlier answers are matched in all of these forms.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import InvalidValueError

Render = Callable[[Sequence[dict[str, Any]], bool], str]
Span = tuple[int, int]

OPENED = (
    "the model's chat template opens a {tag} block in every prompt: answers without one are trained to close it at once"
)
HISTORY = (
    "the model's chat template renders earlier answers without the think block they had when they were given: "
    "they are trained as the conversation shows them (mask_history: true trains last answers only)"
)

_BLOCK = re.compile(r"<(?P<tag>think|thinking)>(?P<space>\s*)(?P<end></(?P=tag)>\s*)?\Z")


@dataclass(frozen=True, slots=True)
class AnswerFinder:
    """`render(messages, add_generation_prompt)` returns text; `closing`: result of `closing_of` for the template."""

    render: Render
    closing: str
    note: Callable[[str], None]

    def conversation(
        self, messages: Sequence[dict[str, Any]], where: str, *, last_only: bool
    ) -> tuple[str, list[Span]]:
        """The whole conversation's text and each answer's [start, end) in it; the last message is an answer.

        Raises InvalidValueError when the boundary between a prompt and its answer is ambiguous.
        """
        last = len(messages) - 1
        text, start = self._last(self.render(messages[:last], True), self.render(messages, False), messages, where)
        spans: list[Span] = []
        if not last_only:
            for turn in range(last):
                if messages[turn]["role"] == "assistant":
                    spans.append(self._earlier(text[:start], messages, turn, spans[-1][1] if spans else 0, where))
        return text, [*spans, (start, len(text))]

    def reply(self, messages: Sequence[dict[str, Any]], answer: dict[str, Any], where: str) -> tuple[str, str]:
        """(prompt, answer text that follows it)."""
        prompt, whole = self.render(messages, True), [*messages, answer]
        text, start = self._last(prompt, self.render(whole, False), whole, where)
        return text[:start], text[start:]

    def _last(self, prompt: str, answered: str, messages: Sequence[dict[str, Any]], where: str) -> tuple[str, int]:
        if answered.startswith(prompt):
            return answered, len(prompt)
        # The prompt ends with an opened or empty think block, which the template leaves out of the rendered answer
        # (DeepSeek-R1; Qwen3 without thinking): append the answer to the prompt.
        block = _BLOCK.search(prompt)
        if block and answered.startswith(prompt[: block.start()]):
            visible = answered[block.start() :]
            return prompt + self._after(block, visible, messages[-1].get("content") or ""), len(prompt)
        raise InvalidValueError(_unclear(prompt, answered, len(messages), where))

    def _earlier(self, text: str, messages: Sequence[dict[str, Any]], turn: int, least: int, where: str) -> Span:
        prompt = self.render(messages[:turn], True)
        answer = _visible(prompt, self.render(messages[: turn + 1], False))
        if answer and text.startswith(prompt + answer):
            return len(prompt), len(prompt) + len(answer)
        self.note(HISTORY)
        starts = [len(prompt)] if text.startswith(prompt) else range(_common(prompt, text), least - 1, -1)
        for start, form in itertools.product(starts, self._forms(answer, messages[turn])):
            if text.startswith(form, start):
                return start, start + len(form)
        if len(starts) == 1 and answer and (length := self._shortened(answer, text, starts[0])):
            return starts[0], starts[0] + length
        raise InvalidValueError(_unclear(prompt, text, turn + 1, where))

    def _after(self, block: re.Match[str], visible: str, content: str) -> str:
        """The text after a prompt that ends with `block`; `visible` is the template's rendering of the answer."""
        end = f"</{block['tag']}>"
        if block["end"]:
            answer = visible.rpartition(end)[2]
            return answer.lstrip("\n") if block["end"] != end else answer
        thought, closed, rest = content.rpartition(end)
        inner = thought.lstrip().removeprefix(f"<{block['tag']}>")
        if not closed:
            self.note(OPENED.format(tag=f"<{block['tag']}>"))
            return f"{'' if block['space'] else chr(10)}\n{end}\n\n{visible}"
        gap = "" if visible[:1].isspace() else rest[: len(rest) - len(rest.lstrip())]
        return (inner.lstrip() if block["space"] else inner) + end + gap + visible

    def _forms(self, answer: str, message: dict[str, Any]) -> list[str]:
        """The answer as rendered, then its text unchanged, stripped, or without its think block."""
        forms = [answer] if answer else []
        content = message.get("content") or ""
        if self.closing and not message.get("tool_calls"):
            visible = content.rpartition("</think>")[2]
            texts = dict.fromkeys((content, content.strip(), visible, visible.lstrip("\n"), visible.strip()))
            forms += [text + self.closing for text in texts]
        return forms

    def _shortened(self, answer: str, text: str, start: int) -> int:
        """The answer's length in `text` if exactly one part of it was dropped there, otherwise 0."""
        if not self.closing:
            return 0
        kept = 0
        limit = min(len(answer), len(text) - start)
        while kept < limit and answer[kept] == text[start + kept]:
            kept += 1
        for cut in range(kept, len(answer) - len(self.closing) + 1):
            if kept < limit and answer[cut] == text[start + kept] and text.startswith(answer[cut:], start + kept):
                return kept + len(answer) - cut
        return 0


def closing_of(render: Render) -> str:
    """The text that a template appends to an answer, such as `<|im_end|>` and a newline; may be empty."""
    texts = [
        render([{"role": "user", "content": "u"}, {"role": "assistant", "content": letter}], False) for letter in "ab"
    ]
    length = 0
    while length < min(map(len, texts)) and texts[0][-1 - length] == texts[1][-1 - length]:
        length += 1
    return texts[0][len(texts[0]) - length :]


def _common(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _visible(prompt: str, answered: str) -> str:
    """The text after the prompt, with or without the prompt's think block; empty when neither form matches."""
    for opening in (prompt, _BLOCK.sub("", prompt)):
        if answered.startswith(opening):
            return answered[len(opening) :]
    return ""


def _unclear(prompt: str, answered: str, turn: int, where: str) -> str:
    start = max(_common(prompt, answered) - 20, 0)
    return (
        f"{where}: the model's chat template renders turn {turn} differently once it is answered, so its answer can't "
        f"be told from its prompt: the prompt continues {prompt[start:][-60:]!r}, the conversation "
        f"{answered[start:][:60]!r}"
    )
