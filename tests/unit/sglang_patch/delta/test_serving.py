"""Qwen3-Next and Qwen3.5 in SGLang's own scheduler with the native step: neither chunks, other streams, adapters,
cached prefixes nor SGLang's modules in the step's place change a bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.resident.native_step import Both, installed, prompt
from reference.resident.scheduler import Engine, engine

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.delta import step as delta_step
from kt_runtime.wire.replies import STEP_RUNNING

LENGTHS = (3, 40, 64, 150, 333)
LONG, STATES = 4096, 64


PRESETS = ["tiny-qwen3-next", "tiny-qwen3-5-moe-text"]


@pytest.fixture(scope="module", params=choose(few=PRESETS[:1], usual=PRESETS, every=PRESETS))
def served(
    request: pytest.FixtureRequest, patched_sglang: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("model") / "m"
    make_model(request.param, directory, seed=3)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
    options = ("--dtype", "bfloat16", "--max-total-tokens", "16384", "--max-running-requests", "16")
    states = ("--max-mamba-cache-size", str(STATES))
    with engine(directory, *options, *states, "--max-loras-per-batch", "5") as started:
        assert native_step.state() == STEP_RUNNING
        yield started
        assert native_step.exceptions() == []


Answer = tuple[list[int], list[float], list[float]]


def answers(
    served: Engine, requests: dict[str, list[int]], lora_ids: dict[str, str] | None = None
) -> dict[str, Answer]:
    """Of all requests at once, with an empty cache: tokens, their log-probabilities, and the prompt's."""
    served.clear()
    adapters = lora_ids or {}
    served.run(
        *(
            served.request(rid, tokens, logprob_start_len=0, lora_id=adapters.get(rid))
            for rid, tokens in requests.items()
        )
    )
    return {rid: (served.tokens[rid], served.logprobs[rid], served.prompt_logprobs.get(rid, [])) for rid in requests}


@pytest.fixture(scope="module")
def alone(served: Engine) -> dict[str, Answer]:
    """Each request alone, its prompt in one chunk."""
    found: dict[str, Answer] = {}
    with mock.patch.object(served.scheduler, "chunked_prefill_size", 2048):
        for length in LENGTHS:
            found |= answers(served, {f"r{length}": prompt(length, length % 100)})
    return found


@pytest.mark.parametrize("chunk", [16, 64, 100])
def test_chunks_and_other_streams_change_no_bit(served: Engine, alone: dict[str, Answer], chunk: int) -> None:
    with mock.patch.object(served.scheduler, "chunked_prefill_size", chunk):
        assert answers(served, {f"r{length}": prompt(length, length % 100) for length in LENGTHS}) == alone


@pytest.mark.slow
def test_a_prompt_of_4096_tokens_has_the_same_bits_in_chunks_of_any_size(served: Engine) -> None:
    found = {}
    for chunk in (LONG, 1024, 100, 64):
        with (
            mock.patch.object(served.scheduler, "chunked_prefill_size", chunk),
            mock.patch.object(served.scheduler, "run_batch", wraps=served.scheduler.run_batch) as batches,
        ):
            found[chunk] = answers(served, {"long": prompt(LONG, 11)})["long"]
        assert batches.call_count == -(-LONG // chunk) + served.new_tokens - 1
        assert len(found[chunk][2]) == LONG - 1
    assert all(answer == found[LONG] for answer in found.values())


@pytest.mark.slow
def test_sixteen_streams_with_adapters_are_each_alone(served: Engine) -> None:
    adapters = {
        name: lora.random_adapter(served.config, rank=4, alpha=6.0, seed=seed) for seed, name in enumerate("abcd")
    }
    names = ["a", "b", "c", "d", None]
    requests = {f"s{number}": prompt(20 + 3 * (number // 5), 5) for number in range(16)}
    chosen = {rid: name for number, rid in enumerate(requests) if (name := names[number % 5]) is not None}
    with installed(served, **adapters):
        together = answers(served, requests, chosen)
        for rid, tokens in requests.items():
            lone = answers(served, {rid: tokens}, {rid: chosen[rid]} if rid in chosen else {})
            assert lone[rid] == together[rid]
    assert len({tuple(together[f"s{number}"][1]) for number in range(5)}) == 5  # one prompt, five models


def test_sglang_s_modules_give_the_same_bits(served: Engine, alone: dict[str, Answer]) -> None:
    with mock.patch.object(native_step, "_program", None):
        assert answers(served, {f"r{length}": prompt(length, length % 100) for length in LENGTHS}) == alone


def test_the_comparison_with_the_modules_sees_states_in_other_slots(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.clear()
    program, slots = native_step._program, delta_step.state_slots
    assert program is not None
    checked = Both(served.scheduler.tp_worker.model_runner, program)
    monkeypatch.setattr(native_step, "_program", checked)
    served.run(served.request("right", prompt(33)))
    assert not checked.different

    def others(backend: Any) -> torch.Tensor:
        found = slots(backend)
        assert found is not None
        return (found + 1) % STATES

    monkeypatch.setattr(delta_step, "state_slots", others)
    served.run(served.request("wrong", prompt(34, 9)))
    assert {text.rsplit(",")[0] for text in checked.different} >= {"EXTEND of 34 tokens", "DECODE of 1 tokens"}


def test_cached_prefixes_and_branches_change_no_bit(served: Engine) -> None:
    cached: dict[str, int] = {}
    first = prompt(130, 9)
    cold: dict[str, Answer] = {}
    told, _ = answers(served, {"first": first})["first"][:2]
    longer, branch = [*first, *told, *prompt(20, 40)], [*first[:64], *prompt(30, 77)]
    cold |= answers(served, {"longer": longer}) | answers(served, {"branch": branch})
    served.clear()
    recorder = served.scheduler.output_streamer.send_to_detokenizer

    def record(output: Any, route: Any = None) -> None:
        cached.update(zip(getattr(output, "rids", ()), getattr(output, "cached_tokens", None) or (), strict=False))
        recorder.send_output(output, route)

    with mock.patch.object(
        served.scheduler.output_streamer, "send_to_detokenizer", SimpleNamespace(send_output=record)
    ):
        served.run(served.request("first", first))
        served.run(served.request("longer", longer), served.request("branch", branch))
    assert cached["longer"] >= len(first) and cached["branch"] == 64
    for rid in ("longer", "branch"):
        assert (served.tokens[rid], served.logprobs[rid]) == cold[rid][:2]


def test_an_adapter_finds_no_state_of_another_version(served: Engine) -> None:
    one = lora.random_adapter(served.config, rank=4, alpha=6.0, seed=1)
    tokens = prompt(130, 9)
    with installed(served, one=one):
        expected = answers(served, {"one": tokens}, {"one": "one"})["one"]
        answers(served, {"base": tokens})
        served.run(served.request("one", tokens, logprob_start_len=0, lora_id="one"))
        assert (served.tokens["one"], served.logprobs["one"], served.prompt_logprobs["one"]) == expected


def test_slots_of_ended_requests_are_free_again(served: Engine) -> None:
    served.clear()
    pool = served.scheduler.req_to_token_pool
    free = pool.mamba_allocator.available_size()
    answers(served, {f"r{number}": prompt(10 + number) for number in range(20)})
    served.clear()
    assert pool.mamba_allocator.available_size() == free
    assert torch.isfinite(pool.mamba_pool.mamba_cache.temporal).all()
