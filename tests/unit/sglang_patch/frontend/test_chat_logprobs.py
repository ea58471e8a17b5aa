"""A chat answer's log-probabilities in pieces are the bytes that SGLang writes at once. With SGLang's own classes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend import chat_logprobs

pytestmark = pytest.mark.usefixtures("patched_sglang")


def made(serving: Any, item: dict[str, Any]) -> Any:
    """As SGLang's method; records how many entries were made at once."""
    from sglang.srt.entrypoints.openai import protocol

    meta = item["meta_info"]
    rows, top = meta["output_token_logprobs"], meta.get("output_top_logprobs") or []
    serving.made.append(len(rows) + sum(len(one or ()) for one in top))
    return protocol.ChoiceLogprobs(
        content=[
            protocol.ChatCompletionTokenLogprob(
                token=text,
                bytes=list(text.encode()),
                logprob=logprob,
                top_logprobs=[
                    protocol.TopLogprob(token=other, bytes=list(other.encode()), logprob=value)
                    for value, _, other in (top[place] or () if place < len(top) else ())
                ],
            )
            for place, (logprob, _, text) in enumerate(rows)
        ]
    )


def item(num_tokens: int, num_top: int) -> dict[str, Any]:
    row = (-0.5, 7, 'a "quoted" é')
    top = [[(-0.25 * place, place, "b")] * num_top if place % 3 else None for place in range(num_tokens)]
    return {"meta_info": {"output_token_logprobs": [row] * num_tokens, "output_top_logprobs": top if num_top else None}}


async def answer(serving: Any, items: list[dict[str, Any]], hooked: bool) -> Any:
    from sglang.srt.entrypoints.openai import protocol

    async def handle(serving: Any) -> Any:
        choices = []
        for index, one in enumerate(items):
            logprobs = chat_logprobs.remember(made, serving, one) if hooked else made(serving, one)
            # A text that looks like what is put between the pieces.
            message = protocol.ChatMessage(role="assistant", content='"logprobs":{"content":[]}')
            choices.append(
                protocol.ChatCompletionResponseChoice(
                    index=index, message=message, logprobs=logprobs, finish_reason="stop"
                )
            )
        return protocol.ChatCompletionResponse(
            id="a", created=1, model="m", choices=choices, usage=protocol.UsageInfo()
        )

    if not hooked:
        return (await handle(serving)).model_dump_json(by_alias=True).encode()
    response = await chat_logprobs.written_in_pieces(handle, serving)
    assert response.media_type == "application/json"
    return b"".join([piece async for piece in response.body_iterator])


@pytest.mark.parametrize("shapes", [[(0, 0)], [(3, 0)], [(500, 20)], [(400, 20), (0, 0), (2000, 0), (5, 5)]], ids=str)
def test_pieces_are_small_and_together_what_is_written_at_once(shapes: list[tuple[int, int]]) -> None:
    items = [item(*shape) for shape in shapes]
    whole, pieces = SimpleNamespace(made=[]), SimpleNamespace(made=[])
    expected = asyncio.run(answer(whole, items, hooked=False))
    assert asyncio.run(answer(pieces, items, hooked=True)) == expected
    assert sum(pieces.made) == sum(whole.made)
    assert max(pieces.made) < chat_logprobs.PIECE_ENTRIES + 21


def test_other_tasks_run_between_two_pieces() -> None:
    async def run() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await answer(SimpleNamespace(made=[]), [item(20 * chat_logprobs.PIECE_ENTRIES, 0)], hooked=True)
        counting.cancel()
        return turns

    assert asyncio.run(run()) >= 20


def test_an_answer_without_log_probabilities_and_an_error_stay_as_they_are() -> None:
    from fastapi.responses import ORJSONResponse

    error = ORJSONResponse({"error": "a"}, status_code=400)

    async def refused(_serving: Any) -> Any:
        return error

    assert asyncio.run(chat_logprobs.written_in_pieces(refused, None)) is error
    assert made(SimpleNamespace(made=[]), item(2, 1)) == chat_logprobs.remember(
        made, SimpleNamespace(made=[]), item(2, 1)
    )
