"""A client's sampling request, as SGLang gets it, and the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.tinker.protocol.bodies import EncodedText, ModelInput, Sample, SamplingParams
from kt_runtime.serve.tinker.sampling import check, parameters, sample


def request(tokens: list[int] | None = None, *, params: dict[str, Any] | None = None, **fields: Any) -> Sample:
    chunks = [EncodedText(tokens=[1, 2, 3] if tokens is None else tokens)]
    return Sample(
        prompt=ModelInput(chunks=chunks),
        sampling_params=SamplingParams(**{"max_tokens": 2, **(params or {})}),
        **fields,
    )


def sampled(desk: Any, asked: Sample, adapter: str | None = None) -> Any:
    return asyncio.run(sample(desk.engine, asked, adapter, "key", 64, {"id-1": "version-1"}))


@pytest.mark.parametrize(
    ("stop", "sent"),
    [
        (None, {}),
        ("end", {"stop": ["end"]}),
        (["a", "b"], {"stop": ["a", "b"]}),
        ([5, 6], {"stop_token_ids": [5, 6]}),
        ([], {"ignore_eos": True}),
    ],
)
def test_every_form_of_stop_is_translated(stop: Any, sent: dict[str, Any]) -> None:
    found = parameters(SamplingParams(max_tokens=4, stop=stop), 3, 64)
    assert {name: found[name] for name in ("stop", "stop_token_ids", "ignore_eos") if name in found} == sent


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    assert parameters(SamplingParams(), 10, 64)["max_new_tokens"] == 54


def test_one_sequence_is_one_request(desk: Any) -> None:
    result = sampled(desk, request(prompt_logprobs=True, topk_prompt_logprobs=2))
    assert [(one.tokens, one.logprobs, one.is_stopped) for one in result.sequences] == [([7, 8], [-0.5, -0.5], False)]
    assert result.prompt_logprobs == [None, -1.0, -2.0] and result.prompt_top[1] == [(2, -1.0)] * 2
    assert len(desk.engine.requests) == 1 and desk.engine.requests[0]["lora_path"] is None


def test_several_sequences_find_the_prompt_computed_and_have_seeds_of_their_own(desk: Any) -> None:
    result = sampled(desk, request(params={"seed": 10}, num_samples=3))
    assert len(result.sequences) == 3
    first, *others = desk.engine.requests
    assert first["sampling_params"]["max_new_tokens"] == 0
    assert [one["sampling_params"]["sampling_seed"] for one in others] == [10, 11, 12]
    assert len({one["rid"] for one in desk.engine.requests}) == 4


def test_at_another_temperature_a_second_pass_has_the_models_own_logprobs(desk: Any) -> None:
    result = sampled(desk, request(params={"temperature": 0.5}, topk_sample_logprobs=1))
    again = desk.engine.requests[1]
    assert again["input_ids"] == [1, 2, 3, 7, 8] and again["sampling_params"] == {"max_new_tokens": 0}
    assert again["logprob_start_len"] == 2
    assert result.sequences[0].logprobs == [-1.0, -2.0] and len(result.sequences[0].top) == 2


def test_the_last_prompt_tokens_alone_are_scored(desk: Any) -> None:
    result = sampled(desk, request([1, 2, 3, 4, 5], prompt_logprobs=True, prompt_logprobs_last_n=2))
    assert desk.engine.requests[0]["logprob_start_len"] == 2
    assert result.prompt_logprobs == [None, None, None, -1.0, -2.0]


def test_all_sequences_come_from_one_version_which_the_result_names(desk: Any) -> None:
    desk.engine.names["mine"] = "id-1"
    result = sampled(desk, request(num_samples=2), "mine")
    assert {one["lora_path"] for one in desk.engine.requests} == {"tinker:key"}
    assert result.adapter_version == "version-1" and not desk.engine.pinned


def test_an_ended_sample_is_aborted_in_the_engine(desk: Any) -> None:
    desk.engine.names["mine"] = "id-1"

    async def scenario() -> None:
        desk.engine.gate = asyncio.Event()
        task = asyncio.create_task(sample(desk.engine, request(), "mine", "key", 64, {}))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert desk.engine.aborted == ["tinker-key-0"] and not desk.engine.pinned


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: draws"),
        ({"target_prompt_logprobs": {"data": []}}, "target_prompt_logprobs: "),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs are not asked for"),
        ({"tokens": []}, "prompt: it has no token"),
    ],
)
def test_what_is_not_offered_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        check(request(**fields))
