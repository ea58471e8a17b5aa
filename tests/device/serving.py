"""Servers with the emulated device: every process that they start has it from `import torch` on.

PyTorch loads backends of other packages that name themselves in the entry point `torch.backends`. A folder with the
metadata of such a package, on the path of Python, is enough.

    running = Running("tiny-qwen3-moe", place, directory)
    with running.started():
        running.api, running.client   # serving and training
        running.cached.ask(...)       # says which tier of the prefix cache a prompt's prefix came from
        running.restart()
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from device.backend import NAME
from reference.place import Place
from system.conftest import CachedAnswer, CachedServer
from system.training.test_parity_of_training_and_serving import CHUNK_TOKENS, PAGE_TOKENS, PRESETS, Served

from kt_runtime.cli.connection import resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.memory.plan import cached_numbers_per_token
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

TESTS = Path(__file__).resolve().parents[1]
_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}-device\nVersion: 0\n",
    "entry_points.txt": f"[torch.backends]\n{NAME} = device.backend:enable\n",
}
# Bytes of memory. The KV pool, the tiers' copies and the weights of a tiny model are a few MB.
MEMORY_BYTES = 4 << 30
FAMILIES = {"qwen3": "tiny-qwen3-moe", "deepseek": "tiny-deepseek-v3"}
EXPERTS = {  # options of `kt-runtime serve`
    "off": ("--stream-experts", "off"),
    "hot": ("--stream-experts", "off", "--gpu-experts", "2MiB"),
    "streamed": ("--stream-experts", "16"),
}
# Of the tiers, in tokens: a few prompts fill the device's.
DEVICE_TOKENS, HOST_TOKENS = 768, 2048
PROMPT = np.random.default_rng(1).integers(3, 700, 150).tolist()
CACHED_TOKENS = 144  # whole pages; the last token is always computed


def package(directory: Path) -> dict[str, str]:
    """Makes the package in `directory`. Returns the variables with which Python has the device."""
    metadata = directory / f"{NAME}_device-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    for name, text in _METADATA.items():
        (metadata / name).write_text(text)
    paths = [str(directory), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the compiler has no code for the device
        "LATE_MEMORY_BYTES": str(MEMORY_BYTES),
        # SGLang 0.5.23 makes its pools on the default stream, and the scheduler replaces tensors of them (the list of
        # free pages) on another stream without a wait. That is right while nothing allocates on the default stream:
        # kt-runtime's threads work on the stream of the scheduler (resident/workers.py).
        "LATE_DEFAULT_STREAM_KEEPS": "1",
    }


@dataclass(frozen=True)
class Case:
    """`family`, `experts`: keys of FAMILIES and EXPERTS; `schedule`: "late", "eager" or "random-" and a seed."""

    family: str
    experts: str
    schedule: str

    @classmethod
    def parsed(cls, text: str) -> Self:
        family, experts, schedule = text.split(":")
        return cls(family, experts, schedule)

    def __str__(self) -> str:
        return f"{self.family}:{self.experts}:{self.schedule}"


def seeded(num_seeds: int) -> list[str]:
    """A case for each seed: families take turns, and so do the ways of the experts within a family."""
    ways, families = list(EXPERTS), list(FAMILIES)
    return [f"{families[seed % 2]}:{ways[seed // 2 % 3]}:random-{seed}" for seed in range(num_seeds)]


@dataclass
class Running:
    """A server in float32 with all tiers of the prefix cache, in `directory`. `place`: its device and options."""

    preset: str
    place: Place
    directory: Path
    _cold: dict[str | None, CachedAnswer] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Runs in the block, and has trained and published "tuned" with the session "parity" at its begin."""
        make_model(PRESETS[self.preset](), self.directory / "model", seed=4)
        try:
            self._start()
            self.client.create_session("parity", LoraSettings(rank=6, alpha=20, targets=["all"], seed=5))
            train(self.client, "parity", seed=8, rate=0.005)
            self.client.publish("parity", "tuned")
            yield
        finally:
            self._open.close()

    def restart(self) -> None:
        """The cache's files and the published adapters are kept, sessions are not."""
        self._open.close()
        self._start()

    def _start(self) -> None:
        model = self.directory / "model"
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        token_bytes = 4 * cached_numbers_per_token(config)
        options = ["--adapter-dir", str(self.directory / "adapters"), "--dtype", "float32", "--max-lora-rank", "8"]
        options += ["--cache-page-tokens", str(PAGE_TOKENS), "--cache-device", str(DEVICE_TOKENS * token_bytes)]
        options += ["--cache-host", str(HOST_TOKENS * token_bytes)]
        options += ["--cache-disk", "64MiB", "--cache-dir", str(self.directory / "cache")]
        arguments = self.place.arguments(options, ["--chunked-prefill-size", str(CHUNK_TOKENS)])
        self.api = self._open.enter_context(server(str(model), arguments, self.directory / "server.log"))
        self.client = self._open.enter_context(resident_client(self.api))
        self.cached = CachedServer(self.api, self.preset, self.directory, PAGE_TOKENS, DEVICE_TOKENS, HOST_TOKENS)

    @property
    def served(self) -> Served:
        """For the bodies of test_parity_of_training_and_serving.py."""
        return Served(self.api, self.directory / "model", self.client, "float32", self.place)

    def ask(self, adapter: str | None) -> CachedAnswer:
        """The greedy answer to `PROMPT`, and where its prefix came from."""
        return self.cached.ask(PROMPT, adapter, new_tokens=4)

    def cold(self, adapter: str | None) -> CachedAnswer:
        """As the first time that it was asked, when no prefix was cached."""
        if adapter not in self._cold:
            self._cold[adapter] = self.ask(adapter)
        return self._cold[adapter]


def train(client: ResidentClient, session: str, seed: int, *, sequences: int = 4, rate: float = 0.02) -> None:
    """A step on random sequences of 32 tokens."""
    tokens = np.random.default_rng(seed).integers(3, 700, (sequences, 33)).tolist()
    client.forward_backward(session, Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens]))
    client.optim_step(session, rate)
