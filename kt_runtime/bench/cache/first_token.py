"""Time to first token of prompts whose prefix comes from one tier only, with a real server that is started twice.

The device tier has room for one prompt, so each prompt evicts the previous one to the host tier, which has room for all
prompts. `/flush_cache` empties both tiers. The answer reports which tier served a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kt_runtime.bench.cache import system_cache
from kt_runtime.bench.cache.plan import SOURCES, Plan
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.errors import RuntimeFault

QUESTION_TOKENS = 8  # tokens after the prefix in every prompt; less than a page, so never cached
TIMEOUT_S = 3600.0
SETTLE_S = 120.0  # until all computed pages are on the disk
TIER_OF = {"cold": None, "device": "device", "host": "host", "disk": "storage", "disk_after_restart": "storage"}


class FirstToken:
    """`token_bytes`: KV of a token. `model`: the checkpoint. `directory`: for all files of the servers."""

    def __init__(self, plan: Plan, model: Path, dtype: str, token_bytes: int, vocabulary: int, directory: Path) -> None:
        self._plan, self._model, self._dtype, self._token_bytes = plan, model, dtype, token_bytes
        self._directory = directory
        shape = (plan.rounds + 1, plan.tokens + QUESTION_TOKENS)
        prompts = np.random.default_rng(0).integers(3, vocabulary, shape)
        self._warm_up, *self._prompts = [prompt.tolist() for prompt in prompts]
        self.samples_ms: dict[str, list[float]] = {source: [] for source in SOURCES}
        self.answers: dict[str, list[int]] = {source: [] for source in SOURCES}
        self.cached_shares: list[float | None] = []

    def measure(self, say: Callable[[str], None]) -> None:
        say(f"starting a server in {self._dtype}")
        with server(str(self._model), self._options(), self._directory / "server.log") as api:
            patient = ServerAPI(api.url, timeout_s=TIMEOUT_S)
            self._ask(patient, self._warm_up, None)
            for number, prompt in enumerate(self._prompts, start=1):
                self._sample(patient, "cold", prompt, say)
                self._wait_for_disk(patient, number + 1)
                self._sample(patient, "device", prompt, say)
            for prompt in self._prompts:
                self._sample(patient, "host", prompt, say)
            _flush(api)
            for prompt in self._prompts:
                self._sample(patient, "disk", prompt, say)
        say("starting the server again")
        with server(str(self._model), self._options(), self._directory / "server-again.log") as api:
            patient = ServerAPI(api.url, timeout_s=TIMEOUT_S)
            self._ask(patient, list(reversed(self._warm_up)), None)
            for prompt in self._prompts:
                self._sample(patient, "disk_after_restart", prompt, say)

    def different_answers(self) -> int:
        """Number of first tokens that differ from the cold prompt's. Rounding may differ, since a cached prefix changes
        how the prompt is split."""
        cold = self.answers["cold"]
        return sum(a != b for source in SOURCES for a, b in zip(self.answers[source], cold, strict=True))

    def _options(self) -> list[str]:
        plan = self._plan
        page = plan.page_tokens
        # The prefix's pages, a partial one, one for the answer and one more that SGLang's scheduler requires.
        device_tokens = plan.tokens + 3 * page
        host_tokens = (plan.rounds + 3) * device_tokens
        pages = (2 * plan.rounds + 4) * (plan.tokens // page + 1)
        sizes = {
            "device": device_tokens * self._token_bytes,
            "host": host_tokens * self._token_bytes,
            "disk": 2 * pages * page * self._token_bytes + (16 << 20),
        }
        options = [text for tier, size in sizes.items() for text in (f"--cache-{tier}", str(size))]
        options += ["--cache-dir", str(self._directory / "cache"), "--cache-page-tokens", str(page)]
        options += ["--context-tokens", str(device_tokens), "--dtype", self._dtype, "--max-running-requests", "1"]
        options += ["--max-lora-rank", "8", "--lora-slots", "2", "--adapter-dir", str(self._directory / "adapters")]
        return options

    def _sample(self, api: ServerAPI, source: str, prompt: list[int], say: Callable[[str], None]) -> None:
        if source.startswith("disk"):
            paths = [path for path in (self._directory / "cache").rglob("*.seg") if path.is_file()]
            system_cache.drop(*paths)
            self.cached_shares.append(system_cache.cached_share(*paths))
        milliseconds, answer = self._ask(api, prompt, TIER_OF[source])
        self.samples_ms[source].append(milliseconds)
        self.answers[source].append(answer)
        say(f"{source}: {milliseconds:.0f} ms")

    def _ask(self, api: ServerAPI, prompt: list[int], tier: str | None) -> tuple[float, int]:
        """(milliseconds until the answer with the first token, that token).

        Raises RuntimeFault unless `tier` served the whole prefix (None: unless no tier served any of it).
        """
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        started = time.perf_counter()
        answer = api.post("/generate", body)
        milliseconds = 1000 * (time.perf_counter() - started)
        check_tier(answer["meta_info"], tier, self._plan.tokens)
        return milliseconds, int(answer["output_ids"][0])

    def _wait_for_disk(self, api: ServerAPI, num_prompts: int) -> None:
        """Waits until all computed pages are on the disk: unwritten pages would be served from memory, and copying them
        would disturb the next sample."""
        wanted = num_prompts * (self._plan.tokens // self._plan.page_tokens)
        deadline = time.monotonic() + SETTLE_S
        while True:
            tiers = {tier["tier"]: tier for tier in api.get("/kt/status")["cache"]}
            if tiers["disk"]["pages"] >= wanted:
                return
            if time.monotonic() > deadline:
                raise RuntimeFault(f"{wanted} pages should be on the disk after {SETTLE_S:.0f} s: {tiers['disk']}")
            time.sleep(0.1)


def check_tier(meta_info: dict[str, Any], tier: str | None, tokens: int) -> None:
    """Raises RuntimeFault unless `tier` alone served `tokens` of the prompt; None: unless no tier served any."""
    details = meta_info.get("cached_tokens_details") or {}
    served = {name: int(details.get(name) or 0) for name in ("device", "host", "storage")}
    if served != dict.fromkeys(served, 0) | ({} if tier is None else {tier: tokens}):
        wanted = "computed" if tier is None else f"served by {tier!r}"
        raise RuntimeFault(f"{tokens} tokens of a prompt should be {wanted}; the server says {served}")


def _flush(api: ServerAPI) -> None:
    """Empties the device and the host tier."""
    answer = httpx.post(f"{api.url}/flush_cache", params={"timeout": 30}, timeout=60.0, trust_env=False)
    if not answer.is_success:
        raise RuntimeFault(f"/flush_cache: HTTP {answer.status_code}: {answer.text[:300]}")
