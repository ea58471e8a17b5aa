"""More adapters than fit into the memory for adapters of batches, on a real server under streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from reference import lora
from reference.place import Place

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model

RANK = 64
NUM_ADAPTERS, NUM_STREAMS = 5, 6
MEMORY = "10MiB"  # two adapters of rank 64 in float32, of 4 MiB each
ROUNDS = 2
NEW_TOKENS = 12


@dataclass(frozen=True)
class Served:
    api: ServerAPI
    names: list[str]
    paths: list[Path]
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("server")
    make_model("tiny-qwen3-moe", directory / "model", seed=3)
    config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
    names = [f"adapter-{number}" for number in range(NUM_ADAPTERS)]
    paths = [
        lora.write_adapter(directory / name, lora.random_adapter(config, rank=RANK, alpha=64.0, seed=seed))
        for seed, name in enumerate(names)
    ]
    options = ["--dtype", "float32", "--max-lora-rank", str(RANK), "--lora-memory", MEMORY]
    options += ["--adapter-dir", str(directory / "adapters")]
    with server(str(directory / "model"), place.arguments(options), directory / "server.log") as api:
        for name, path in zip(names, paths, strict=True):
            api.post("/kt/adapters", {"name": name, "path": str(path)})
        yield Served(api, names, paths, directory / "server.log")


def answer(served: Served, adapter: str | None, number: int, tokens: int = NEW_TOKENS) -> list[int]:
    body = {
        "input_ids": [50 + 11 * number + step for step in range(8)],
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "lora_path": adapter,
    }
    found: list[int] = served.api.post("/generate", body)["output_ids"]
    return found


def test_every_adapter_answers_while_others_have_the_memory(served: Served) -> None:
    """The answers are those of each adapter alone. Adapters leave and come back, and so does one that is replaced."""
    requests = [(name, number) for number in range(3) for name in (*served.names, None)]
    alone = [answer(served, *request) for request in requests]
    assert len({tuple(each) for each in alone}) > len(requests) / 2

    with ThreadPoolExecutor(NUM_STREAMS + len(requests)) as threads:
        streams = [threads.submit(answer, served, None, 10 + number, 300) for number in range(NUM_STREAMS)]
        for number in range(ROUNDS):
            waiting = [threads.submit(answer, served, *request) for request in requests]
            served.api.post("/kt/adapters", {"name": "moved", "path": str(served.paths[number])})
            assert [each.result() for each in waiting] == alone
            assert answer(served, "moved", 0) == alone[requests.index((served.names[number], 0))]
        assert all(len(each.result()) == 300 for each in streams)
    served.api.delete("/kt/adapters/moved")


@pytest.mark.usefixtures("served")
def test_adapters_came_back_beside_the_engine_s_thread(served: Served, place: Place) -> None:
    came_back = served.log.read_text(errors="replace").count("of a batch again")
    print(f"adapters came back {came_back} times")
    if place.native_step:  # on a CPU; elsewhere the first batch copies them
        assert came_back >= NUM_ADAPTERS
