"""Turns conversations into token ids and loss weights, with the chat template that the server itself answers with.

Which tokens are trained on is found by rendering twice: a conversation up to a question, as the server would prompt the
model with it, must be a prefix of the conversation up to the answer; what follows the prefix is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data import Conversation


@dataclass(frozen=True)
class Example:
    """`tokens` and `targets` have one length: targets[i] follows tokens[i]. `trained[i]` says if it counts."""

    tokens: list[int]
    targets: list[int]
    trained: list[bool]

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


class Renderer:
    """Renders with the tokenizer of the served model's directory. No code from that directory is run."""

    def __init__(self, model_directory: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_directory, trust_remote_code=False)
        if not self.tokenizer.chat_template:
            raise InvalidValueError(f"{model_directory}: the tokenizer has no chat template; training needs one")

    def render(self, conversation: Conversation, cutoff_len: int, train_on_prompt: bool = False) -> Example | None:
        """None when the cut at `cutoff_len` tokens leaves nothing to train on."""
        ids: list[int] = []
        trained: list[bool] = []
        messages = list(conversation.messages)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._ids(messages[:index], add_generation_prompt=True)
            answered = self._ids(messages[: index + 1], add_generation_prompt=False)
            if answered[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
                raise InvalidValueError(
                    f"{conversation.where}: the model's chat template renders turn {index + 1} differently once it is "
                    "answered, so its answer can't be told from its prompt"
                )
            trained += [train_on_prompt] * (len(prompt) - len(ids)) + [True] * (len(answered) - len(prompt))
            ids = answered
        ids, trained = ids[: cutoff_len + 1], trained[: cutoff_len + 1]
        example = Example(tokens=ids[:-1], targets=ids[1:], trained=trained[1:])
        return example if example.num_trained else None

    def marked(self, example: Example) -> str:
        """The example as text, with the trained tokens between «»."""
        runs: list[tuple[bool, list[int]]] = [(False, example.tokens[:1])]
        for token, trained in zip(example.targets, example.trained, strict=True):
            if trained != runs[-1][0]:
                runs.append((trained, []))
            runs[-1][1].append(token)
        return "".join(
            f"«{text}»" if trained else text for trained, ids in runs for text in [self.tokenizer.decode(ids)]
        )

    def _ids(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
            )
        )
