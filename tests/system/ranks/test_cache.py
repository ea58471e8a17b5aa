"""The prefix cache's host tier over two ranks, each of which holds the keys and values of its heads: a prefix comes
back with the bits that one process computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reference import lora
from system.conftest import CachedAnswer, CachedServer, StartCachedServer

from kt_runtime.serve.models.presets import load_preset

PAGE_TOKENS = 16
PROMPT_TOKENS, CACHED_TOKENS = 200, 192  # whole pages; the last token is always computed
RANKS = ("--tp-size", "2", "--expert-threads", "1")


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, PROMPT_TOKENS).tolist()


def answers(served: CachedServer, adapter: Path) -> list[CachedAnswer]:
    """Of the base and of an adapter: computed, from the device, from the host, and with a page of it that differs."""
    served.api.post("/kt/adapters", {"name": "one", "path": str(adapter)})
    found = []
    for seed, name in enumerate((None, "one")):
        asked = prompt(seed)
        found += [served.ask(asked, name), served.ask(asked, name)]
        served.flush_device()
        found.append(served.ask(asked, name))
        served.flush_device()
        found.append(served.ask([*asked[: CACHED_TOKENS - PAGE_TOKENS], *prompt(9)[:40]], name))
    return found


def test_ranks_give_back_from_the_host_tier_what_one_process_computes(
    tmp_path: Path, cached_server: StartCachedServer
) -> None:
    config = load_preset("tiny-qwen3-moe").config
    adapter = lora.write_adapter(tmp_path / "adapter", lora.random_adapter(config, rank=8, alpha=12.0, seed=1))
    with cached_server("tiny-qwen3-moe", tmp_path / "one", disk="0", options=RANKS[2:]) as served:
        expected = answers(served, adapter)
    with cached_server("tiny-qwen3-moe", tmp_path / "two", disk="0", options=RANKS) as served:
        found = answers(served, adapter)
        host: dict[str, Any] = next(each for each in served.api.get("/kt/status")["cache"] if each["tier"] == "host")
    assert found == expected
    host_hits = [answer.tiers["host"] for answer in found]
    assert host_hits == 2 * [0, 0, CACHED_TOKENS, CACHED_TOKENS - PAGE_TOKENS]
    assert found[0].tokens == found[1].tokens == found[2].tokens != found[4].tokens
    assert host["hits"] >= 2 * (2 * CACHED_TOKENS // PAGE_TOKENS - 1)
