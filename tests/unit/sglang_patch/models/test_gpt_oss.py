"""gpt-oss in SGLang's own scheduler: a token's bits depend on its own sequence alone, also behind a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from reference import lora
from reference.resident.native_step import installed
from reference.resident.scheduler import Engine, engine

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset

TOKENS, CHUNKS = 4096, (64, 4096)
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preset = load_preset("tiny-gpt-oss")
    longer = msgspec.structs.replace(preset, config=preset.config | {"max_position_embeddings": 2 * TOKENS})
    return make_model(longer, tmp_path_factory.mktemp("model") / "m", seed=4)


@pytest.mark.slow
def test_chunks_of_a_long_prompt_prefixes_and_branches_change_no_bit(patched_sglang: None, model: Path) -> None:
    first, branch = prompt(TOKENS, 1), prompt(TOKENS, 1)[:3000] + prompt(900, 2)
    found = []
    for chunk in CHUNKS:
        with engine(model, "--dtype", "bfloat16", "--chunked-prefill-size", str(chunk), *ARGUMENTS) as served:
            found.append((computed(served, "first", first), computed(served, "branch", branch)))
            if chunk == CHUNKS[0]:
                served.clear()
                served.run(served.request("first", first))
                served.run(served.request("again", first), served.request("branched", branch))
                for rid, alone in (("again", found[0][0]), ("branched", found[0][1])):
                    assert served.logprobs[rid] == alone[-len(served.logprobs[rid]) :]
    assert all(other == found[0] for other in found[1:])


@pytest.mark.slow
def test_16_streams_with_4_adapters_have_the_bits_of_each_alone(patched_sglang: None, model: Path) -> None:
    with engine(model, "--dtype", "bfloat16", "--enable-mixed-chunk", *ARGUMENTS) as served:
        drawn = {f"a{seed}": lora.random_adapter(served.config, rank=4, alpha=6, seed=seed) for seed in range(ADAPTERS)}
        with installed(served, **drawn):
            names = [None, *drawn]
            streams = {
                f"r{index}": (prompt(20 + 17 * index, index), names[index % len(names)]) for index in range(STREAMS)
            }
            alone = {rid: computed(served, rid, tokens, lora_id=name) for rid, (tokens, name) in streams.items()}
            served.clear()
            served.run(
                *(
                    served.request(rid, tokens, logprob_start_len=0, lora_id=name)
                    for rid, (tokens, name) in streams.items()
                )
            )
            assert {rid: logprobs(served, rid) for rid in streams} == alone
            assert len({tuple(values) for values in alone.values()}) == STREAMS
