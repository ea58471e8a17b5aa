"""A conversation with the resident model: history, answering adapter, and requests to the server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import httpx

from kt_runtime.cli.chat.answer_stream import chat_pieces, generated_pieces
from kt_runtime.errors import KtError

Message = dict[str, str]
MESSAGE_TOKENS = 32  # more than any chat template puts around a message


@dataclass
class Conversation:
    """`base`: the model's name at the server. `adapter`: the answering adapter, None for the base.

    `context_tokens`: the server's limit for prompt and answer together. `max_new_tokens`: of one answer, None: the
    rest of the context. `options`: further fields of /v1/chat/completions. `render`: renders messages to token ids in
    place of the server's template; the requests then go to /generate with SGLang's parameters in `sampling`.
    """

    http: httpx.Client
    base: str
    context_tokens: int
    adapter: str | None = None
    max_new_tokens: int | None = None
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    render: Callable[[list[Message]], list[int]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yields the answer piece by piece and adds question and answer to the history.

        The history keeps the received part of an interrupted answer (KeyboardInterrupt, or the iterator closed). After
        an error, or an empty answer, the history drops the question too, so that it can be asked again. Raises the
        errors of `chat_pieces`.
        """
        self.turns.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            with contextlib.closing(self._pieces()) as pieces:
                for piece in pieces:
                    said.append(piece)
                    yield piece
        except KtError:
            said.clear()
            raise
        finally:
            if said:
                self.turns.append({"role": "assistant", "content": "".join(said)})
            else:
                self.turns.pop()

    @property
    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def _pieces(self) -> Generator[str, None, None]:
        if self.render is not None:
            return self._rendered_pieces(self.render(self.messages))
        model = f"{self.base}:{self.adapter}" if self.adapter else self.base
        body: dict[str, Any] = {**self.options, "model": model, "messages": self.messages}
        # The server refuses a max_tokens that exceeds the context left by the prompt. The prompt's number of tokens is
        # unknown here, at most one per byte. If max_tokens may not fit, the context alone is the limit.
        most_tokens = sum(len(message["content"].encode()) + MESSAGE_TOKENS for message in self.messages)
        if self.max_new_tokens is not None and most_tokens + self.max_new_tokens <= self.context_tokens:
            body["max_tokens"] = self.max_new_tokens
        return chat_pieces(self.http, body)

    def _rendered_pieces(self, prompt: list[int]) -> Generator[str, None, None]:
        room = max(self.context_tokens - len(prompt), 1)
        limit = min(self.max_new_tokens or room, room)
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {**self.sampling, "max_new_tokens": limit}}
        return generated_pieces(self.http, body | ({"lora_path": self.adapter} if self.adapter else {}))
