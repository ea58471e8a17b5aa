"""Servers that several test modules share: one in float32 per tiny family, and those with a tiered prefix cache."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from reference.place import Place
from system import forked_server

from kt_runtime.cli import server_process
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.memory.plan import cached_numbers_per_token
from kt_runtime.serve.models.make_model import make_model

PRESETS = ("tiny-deepseek-v3", "tiny-qwen3-moe")
# Prompts longer than this are computed in chunks.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Served:
    api: ServerAPI
    preset: str
    model_directory: Path
    log: Path


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "_start", forked_server.start)
        forked_server.import_all()
        yield


@pytest.fixture(scope="session")
def float32_servers(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Callable[[str], Served]]:
    """The server of a preset. It starts once and runs until the session's end, so files of tests share it."""
    with contextlib.ExitStack() as running:

        @functools.cache
        def start(preset: str) -> Served:
            directory = tmp_path_factory.mktemp(preset)
            make_model(preset, directory / "model", seed=2)
            options = ["--dtype", "float32", "--max-total-tokens", "8192", "--adapter-dir", str(directory / "adapters")]
            options += ["--tinker-timeout", "25"]
            if place.native_step:  # on a CPU
                options += ["--routing-replay", "16MiB"]
            arguments = place.arguments(options, ["--chunked-prefill-size", str(CHUNK_TOKENS), "--page-size", "8"])
            log = directory / "server.log"
            api = running.enter_context(server(str(directory / "model"), arguments, log))
            return Served(api, preset, directory / "model", log)

        yield start


@pytest.fixture(scope="session", params=PRESETS)
def float32_server(request: pytest.FixtureRequest, float32_servers: Callable[[str], Served]) -> Served:
    """`kt-runtime serve` in float32 with chunked prefill and pages of 8 tokens. Tests must leave no adapter behind."""
    return float32_servers(request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "preset(name): of the servers of `float32_server`, this one is enough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out what a module's `preset` leaves to one server."""
    left = [item for item in items if _is_for_another_server(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def _is_for_another_server(item: pytest.Item) -> bool:
    marker, callspec = item.get_closest_marker("preset"), getattr(item, "callspec", None)
    return marker is not None and callspec is not None and callspec.params.get("float32_server", "") != marker.args[0]


@dataclass(frozen=True)
class CachedAnswer:
    """`tiers`: how many of the prompt's tokens came from where, `computed` is the rest."""

    tokens: list[int]
    logprobs: list[float]
    tiers: dict[str, int]


@dataclass(frozen=True)
class CachedServer:
    """A server whose prefix cache has tiers. Sizes in tokens; `place` holds model, adapters, cache and log."""

    api: ServerAPI
    preset: str
    place: Path
    page_tokens: int
    device_tokens: int
    host_tokens: int
    _fillings: Iterator[int] = field(default_factory=lambda: itertools.count(1_000_000))

    @property
    def model_directory(self) -> Path:
        return self.place / "model"

    @property
    def cache_directory(self) -> Path:
        return self.place / "cache"

    @property
    def log(self) -> Path:
        return self.place / "server.log"

    def ask(self, prompt: Sequence[int], adapter: str | None = None, new_tokens: int = 12) -> CachedAnswer:
        """Greedy."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "lora_path": adapter,
        }
        answer = self.api.post("/generate", body)
        meta = answer["meta_info"]
        details = meta["cached_tokens_details"]
        tiers = {"device": details["device"], "host": details["host"], "disk": details.get("storage", 0)}
        tiers["computed"] = meta["prompt_tokens"] - sum(tiers.values())
        return CachedAnswer(answer["output_ids"], [item[0] for item in meta["output_token_logprobs"]], tiers)

    def flush_device(self) -> None:
        """By other prompts: SGLang has no route for it. The host tier must have room for another device pool."""
        self._fill(self.device_tokens)

    def flush_memory(self) -> None:
        """Device and host tier, as the route does it. Waits until pages on their way between tiers have arrived."""
        httpx.post(f"{self.api.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()

    def evict_from_memory(self) -> None:
        """Device and host tier, by other prompts."""
        self._fill(self.device_tokens + self.host_tokens)

    def _fill(self, num_tokens: int) -> None:
        length = self.device_tokens // 3
        for _ in range(-(-num_tokens // (length // self.page_tokens * self.page_tokens))):
            self.ask(random_prompt(next(self._fillings), length), new_tokens=1)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 700) for _ in range(num_tokens)]


StartCachedServer = Callable[..., contextlib.AbstractContextManager[CachedServer]]


@pytest.fixture(scope="session")
def cached_server(place: Place) -> StartCachedServer:
    """A function that starts `kt-runtime serve` with all three tiers, small enough to be filled by a few prompts.

    `cached_server(preset, directory, ...)` is a context manager. What is in `directory` already (model, adapters,
    cache) is used again: calling it twice with the same `directory` is a restart. Sizes are in tokens; `disk` is a size
    as on the command line, "0": no disk tier. `options`: of `kt-runtime serve`; `passed_on`: SGLang's.
    """

    @contextlib.contextmanager
    def start(
        preset: str,
        directory: Path,
        *,
        dtype: str = "bfloat16",
        page_tokens: int = 16,
        device_tokens: int = 512,
        host_tokens: int = 1536,
        disk: str = "64MiB",
        options: Sequence[str] = (),
        passed_on: Sequence[str] = (),
    ) -> Iterator[CachedServer]:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "model").exists():
            make_model(preset, directory / "model", seed=2)
        config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
        token_bytes = cached_numbers_per_token(config) * (4 if dtype == "float32" else 2)
        arguments = ["--dtype", dtype, "--adapter-dir", str(directory / "adapters"), "--max-lora-rank", "8"]
        arguments += ["--cache-page-tokens", str(page_tokens), "--cache-device", str(device_tokens * token_bytes)]
        arguments += ["--cache-host", str(host_tokens * token_bytes)]
        if disk != "0":
            arguments += ["--cache-disk", disk, "--cache-dir", str(directory / "cache")]
        arguments = place.arguments([*arguments, *options], ["--enable-metrics", *passed_on])
        with server(str(directory / "model"), arguments, directory / "server.log") as api:
            yield CachedServer(api, preset, directory, page_tokens, device_tokens, host_tokens)

    return start
