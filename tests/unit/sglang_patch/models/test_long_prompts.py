"""Families with a mechanism of their own in attention (sinks and windows, chunks, an indexer) in SGLang's scheduler: a
token's bits depend on its own sequence alone, also in a long prompt: 1,536 tokens, 4,096 with `TEST_CASES=all`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from reference import lora
from reference.cases import choose
from reference.resident.native_step import installed
from reference.resident.scheduler import Engine, engine

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.wire.replies import STEP_RUNNING

MODELS = ("tiny-gpt-oss", "tiny-llama4", "tiny-deepseek-v32", "tiny-glm-moe-dsa")
# Three blocks of keys that attention computes at once, and 12 to 96 times a window, a chunk or an indexer's choice.
TOKENS = choose(few=1536, usual=1536, every=4096)
CHUNKS = (TOKENS, 1000, 64)
STREAMS, ADAPTERS = 16, 4
ARGUMENTS = ("--max-total-tokens", "12288", "--max-running-requests", str(STREAMS), "--max-loras-per-batch", "5")


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, length).tolist()


def logprobs(served: Engine, rid: str) -> list[float]:
    return [*served.prompt_logprobs[rid], *served.logprobs[rid]]


def computed(served: Engine, rid: str, tokens: list[int], **options: Any) -> list[float]:
    """Alone, with an empty cache: of the prompt's tokens and of the answer's."""
    served.clear()
    served.run(served.request(rid, tokens, logprob_start_len=0, **options))
    return logprobs(served, rid)


@pytest.fixture(scope="module", params=MODELS)
def served(
    request: pytest.FixtureRequest, patched_sglang: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    preset = load_preset(request.param)
    longer = msgspec.structs.replace(preset, config=preset.config | {"max_position_embeddings": 2 * TOKENS})
    model = make_model(longer, tmp_path_factory.mktemp("model") / "m", seed=4)
    with engine(model, "--dtype", "bfloat16", "--enable-mixed-chunk", *ARGUMENTS) as started:
        yield started
        assert native_step.state() == STEP_RUNNING and native_step.exceptions() == []


@pytest.mark.slow
def test_chunks_of_a_long_prompt_prefixes_and_branches_change_no_bit(served: Engine) -> None:
    first, branch = prompt(TOKENS, 1), prompt(TOKENS, 1)[: 3 * TOKENS // 4] + prompt(300, 2)
    alone = {"branched": computed(served, "branched", branch)}
    found = {}
    for chunk in CHUNKS:
        with mock.patch.object(served.scheduler, "chunked_prefill_size", chunk):
            found[chunk] = computed(served, "first", first)
    assert all(other == found[TOKENS] for other in found.values()) and len(found[TOKENS]) == TOKENS - 1 + 8
    alone["again"] = found[TOKENS]
    assert served.cached_tokens() >= TOKENS  # of the last of these, in the smallest chunks
    served.run(served.request("again", first), served.request("branched", branch))
    for rid, expected in alone.items():
        assert served.logprobs[rid] == expected[-len(served.logprobs[rid]) :]


@pytest.mark.slow
def test_16_streams_with_4_adapters_have_the_bits_of_each_alone(served: Engine) -> None:
    drawn = {f"a{seed}": lora.random_adapter(served.config, rank=4, alpha=6, seed=seed) for seed in range(ADAPTERS)}
    with installed(served, **drawn):
        names = [None, *drawn]
        streams = {f"r{index}": (prompt(20 + 17 * index, index), names[index % len(names)]) for index in range(STREAMS)}
        alone = {rid: computed(served, rid, tokens, lora_id=name) for rid, (tokens, name) in streams.items()}
        served.clear()
        served.run(
            *(served.request(rid, tokens, logprob_start_len=0, lora_id=name) for rid, (tokens, name) in streams.items())
        )
        assert {rid: logprobs(served, rid) for rid in streams} == alone
        assert len({tuple(values) for values in alone.values()}) == STREAMS
