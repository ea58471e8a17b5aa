"""The host tier of the prefix cache with Gated DeltaNet's states, in SGLang's own scheduler: a prefix that comes from
the host changes no bit, and is found under the adapter version that computed it alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.resident.native_step import installed, prompt
from reference.resident.scheduler import Engine, engine

from kt_runtime.serve.models.make_model import make_model

LENGTH, OTHERS = 200, 6
TIERS = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_through", "--hicache-ratio", "6")
COPIES = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct")


PRESETS = ["tiny-qwen3-next", "tiny-qwen3-5-moe-text"]


@pytest.fixture(scope="module", params=choose(few=PRESETS[:1], usual=PRESETS, every=PRESETS))
def served(
    request: pytest.FixtureRequest, patched_sglang: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    model = make_model(request.param, tmp_path_factory.mktemp("model") / "m", seed=3)
    small = ("--max-total-tokens", "640", "--max-running-requests", "2", "--max-mamba-cache-size", "8")
    with engine(model, "--dtype", "bfloat16", *small, *TIERS, *COPIES) as started:
        yield started


def asked(served: Engine, rid: str, tokens: list[int], **options: Any) -> tuple[list[int], list[float], dict[str, int]]:
    """Tokens, their log-probabilities, and how many of the prompt's tokens came from which tier."""
    tiers: dict[str, int] = {}
    recorder = served.scheduler.output_streamer.send_to_detokenizer

    def record(output: Any, route: Any = None) -> None:
        for found in getattr(output, "cached_tokens_details", None) or ():
            tiers.update({name: count for name, count in (found or {}).items() if isinstance(count, int)})
        recorder.send_output(output, route)

    streamer = served.scheduler.output_streamer
    with mock.patch.object(streamer, "send_to_detokenizer", SimpleNamespace(send_output=record)):
        served.run(served.request(rid, tokens, **options))
    return served.tokens.pop(rid), served.logprobs.pop(rid), tiers


def fill(served: Engine) -> None:
    """Other prompts, until the device tier has given up the first."""
    for number in range(OTHERS):
        asked(served, f"other{number}", prompt(LENGTH, 50 + number))


def test_a_prefix_and_its_state_come_back_from_the_host(served: Engine) -> None:
    served.clear()
    first = prompt(LENGTH, 9)
    told, _, tiers = asked(served, "first", first)
    assert not tiers.get("host")
    longer = [*first, *told, *prompt(30, 40)]
    served.clear()
    cold = asked(served, "longer", longer)
    assert not cold[2].get("device") and not cold[2].get("host")
    served.clear()
    asked(served, "first", first)
    fill(served)
    warm = asked(served, "longer", longer)
    assert warm[2]["host"] >= LENGTH
    assert warm[:2] == cold[:2]


@pytest.mark.slow
def test_the_comparison_sees_a_state_that_did_not_come_back(served: Engine) -> None:
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    first = prompt(LENGTH, 19)
    longer = [*first, *prompt(30, 41)]
    served.clear()
    cold = asked(served, "longer", longer)
    served.clear()
    asked(served, "first", first)
    fill(served)
    with mock.patch.object(MambaPoolHost, "load_to_device_per_layer", lambda *args, **kwargs: None):
        warm = asked(served, "longer", longer)
    assert warm[2]["host"] >= LENGTH and warm[:2] != cold[:2]


@pytest.mark.slow
def test_an_adapter_finds_no_state_of_another_version_in_the_host_tier(served: Engine) -> None:
    tokens = prompt(LENGTH, 29)
    with installed(served, one=lora.random_adapter(served.config, rank=4, alpha=6.0, seed=1)):
        served.clear()
        cold = asked(served, "one", tokens, lora_id="one")
        served.clear()
        asked(served, "base", tokens)
        fill(served)
        found = asked(served, "one", tokens, lora_id="one")
        assert not found[2].get("host") and found[:2] == cold[:2]
        fill(served)
        again = asked(served, "one", [*tokens, *prompt(9, 3)], lora_id="one")
        assert again[2]["host"] >= LENGTH


@pytest.mark.slow
def test_slots_of_both_pools_are_free_again(served: Engine) -> None:
    served.clear()
    pool, host = served.scheduler.req_to_token_pool, served.scheduler.tree_cache.host_pool_group
    before = pool.mamba_allocator.available_size(), [entry.host_pool.available_size() for entry in host.entries]
    fill(served)
    served.clear()
    assert before == (
        pool.mamba_allocator.available_size(),
        [entry.host_pool.available_size() for entry in host.entries],
    )
    assert torch.isfinite(pool.mamba_pool.mamba_cache.temporal).all()
