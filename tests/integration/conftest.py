"""Servers that several test modules share: one float32 server per tiny family, started once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.make_model import make_model

PRESETS = ("tiny-deepseek-v3", "tiny-qwen3-moe")
# Prompts longer than this are computed in chunks.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Served:
    api: ServerAPI
    preset: str
    model_directory: Path
    log: Path


@pytest.fixture(scope="session", params=PRESETS)
def float32_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`kt-runtime serve` in float32 with chunked prefill and pages of 8 tokens. Tests must leave no adapter behind."""
    place = tmp_path_factory.mktemp(request.param)
    make_model(request.param, place / "model", seed=2)
    options = ["--dtype", "float32", "--max-total-tokens", "8192", "--adapter-dir", str(place / "adapters")]
    passed_on = ["--", "--chunked-prefill-size", str(CHUNK_TOKENS), "--page-size", "8"]
    log = place / "server.log"
    with server(str(place / "model"), [*options, *passed_on], log) as api:
        yield Served(api, request.param, place / "model", log)
