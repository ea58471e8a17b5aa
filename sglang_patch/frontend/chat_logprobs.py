"""Writes the log-probabilities of a chat answer in pieces, so that the event loop can serve other requests meanwhile.

Symbols (SGLang 0.5.23), methods of `sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat`, hooked:

- `_process_response_logprobs`: SGLang creates one pydantic object per log-probability of an answer, 1.3 KB and 6 to 17
  µs including its JSON, without yielding to the event loop: 10 s and 1 GB for 20 log-probabilities at each of 16,000
  tokens of two samples. The hook only stores the engine's numbers.
- `_handle_non_streaming_request`: for a few positions at a time, the hook creates the objects with SGLang's own method,
  writes their JSON, frees them and yields to the event loop. A stream's chunks hold few positions already.

The client gets the same bytes, chunked.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
PROCESS = f"{CHAT}._process_response_logprobs"
HANDLE = f"{CHAT}._handle_non_streaming_request"
SYMBOLS = (PROCESS, HANDLE, "sglang.srt.entrypoints.openai.protocol.ChatCompletionResponse")

PIECE_ENTRIES = 1024  # about 10 ms of work
BEFORE, AFTER = b'{"content":[', b"]}"
# A choice's logprobs without positions. The answer's own text can't contain this: its quotes are escaped.
EMPTY = b'"logprobs":' + BEFORE + AFTER

Original = Callable[..., Any]


@dataclass(frozen=True)
class Rows:
    """The engine's triples of one choice. `tokens`: one per position. `top`: a list per position, or empty.

    `made(item)`: calls SGLang's own method.
    """

    tokens: Sequence[Any]
    top: Sequence[Any]
    made: Callable[[dict[str, Any]], Any]

    def of(self, start: int, end: int) -> Any:
        """SGLang's object for the positions from `start` to `end`."""
        item = {"output_token_logprobs": self.tokens[start:end], "output_top_logprobs": self.top[start:end]}
        return self.made({"meta_info": item})

    def json(self) -> Iterator[bytes]:
        """The JSON of all positions in pieces, without the enclosing object and brackets."""
        start = 0
        while start < len(self.tokens):
            end = self._end_of_piece(start)
            text: bytes = self.of(start, end).model_dump_json(by_alias=True).encode()
            yield (b"," if start else b"") + text.removeprefix(BEFORE).removesuffix(AFTER)
            start = end

    def _end_of_piece(self, start: int) -> int:
        end, entries = start, 0
        while end < len(self.tokens) and entries < PIECE_ENTRIES:
            entries += 1 + (len(self.top[end] or ()) if end < len(self.top) else 0)
            end += 1
        return end


# The choices of the answer that the current task creates.
_remembered: contextvars.ContextVar[list[Rows] | None] = contextvars.ContextVar("remembered_logprobs", default=None)


def install(hooks: Hooks) -> None:
    hooks.around(PROCESS, remember)
    hooks.around(HANDLE, written_in_pieces)


def remember(original: Original, serving: Any, ret_item: dict[str, Any]) -> Any:
    choices = _remembered.get()
    if choices is None:
        return original(serving, ret_item)
    meta = ret_item["meta_info"]
    rows = Rows(
        meta["output_token_logprobs"], meta.get("output_top_logprobs") or (), lambda item: original(serving, item)
    )
    choices.append(rows)
    return rows.of(0, 0)


async def written_in_pieces(original: Original, serving: Any, *args: Any, **kwargs: Any) -> Any:
    from fastapi.responses import StreamingResponse
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse

    choices: list[Rows] = []
    token = _remembered.set(choices)
    try:
        answer = await original(serving, *args, **kwargs)
    finally:
        _remembered.reset(token)
    if not choices or not isinstance(answer, ChatCompletionResponse):
        return answer
    between = answer.model_dump_json(by_alias=True).encode().split(EMPTY)
    assert len(between) == len(choices) + 1
    return StreamingResponse(_pieces(between, choices), media_type="application/json")


async def _pieces(between: list[bytes], choices: list[Rows]) -> AsyncIterator[bytes]:
    yield between[0]
    for rows, rest in zip(choices, between[1:], strict=True):
        yield b'"logprobs":' + BEFORE
        for piece in rows.json():
            yield piece
            await asyncio.sleep(0)  # sending to a fast client never yields to the event loop
        yield AFTER + rest
