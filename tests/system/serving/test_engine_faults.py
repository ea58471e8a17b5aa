"""Requests that a real server's engine fails at end alone, while others are answered as before.

What the front door refuses does not get this far (test_front_door.py); tests/unit/sglang_patch/test_faults.py and
test_finite_rows.py have the faults that can't be asked for over HTTP.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from reference import lora
from system.conftest import Served
from transformers import AutoModelForCausalLM

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.wire.names import NamesChannel

PROMPT = [5, 6, 7, 8]
FATAL = 613  # the one token that the poisoned adapter overflows at
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


pytestmark = pytest.mark.preset("tiny-deepseek-v3")


@pytest.fixture
def client(float32_server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=float32_server.api.url, timeout=60.0, trust_env=False) as client:
        yield client


def ask(client: httpx.Client, input_ids: list[int], adapter: str | None = None, **parameters: Any) -> httpx.Response:
    body = {"input_ids": input_ids, "sampling_params": GREEDY | parameters, "lora_path": adapter}
    return client.post("/generate", json=body)


def tokens(client: httpx.Client) -> list[int]:
    answer = ask(client, PROMPT)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["output_ids"]
    return found


class KeepAsking:
    """A client that asks the base the same thing until it is left; `answers` has the different ones."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._leave = client, threading.Event()
        self.answers: set[tuple[int, ...]] = set()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._leave.is_set():
            self.answers.add(tuple(tokens(self._client)))

    def __enter__(self) -> KeepAsking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()


def first_mlp_inputs(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """What the first layer's MLP gets for each token of the prompts, [T, H]."""
    seen: list[torch.Tensor] = []
    hook = model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *args: seen.append(args[2][0]))
    with torch.no_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]))
    hook.remove()
    return torch.cat(seen).double()


def poisoned_adapter(directory: Path) -> AdapterTensors:
    """Finite weights with which gate times up overflows for FATAL alone, at the start of a prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    others = [[token] for token in range(3, 700, 5) if token != FATAL]
    others += [[(7 * row + 11 * step) % 600 for step in range(40)] for row in range(8)]
    x = first_mlp_inputs(model, others)
    fatal = first_mlp_inputs(model, [[FATAL]])[0]
    direction = torch.linalg.solve(x.T @ x / len(x) + 1e-6 * torch.eye(x.shape[1]), fatal)
    direction /= direction @ fatal
    assert (x @ direction).square().max() < 0.25
    scale = 1e39**0.5  # its square is beyond float32, a quarter of it is not
    modules = {}
    for name, pair in lora.random_adapter(
        config_of(directory), rank=1, alpha=1.0, seed=0, only=("mlp",)
    ).modules.items():
        if name.startswith("model.layers.0.") and name.endswith(("gate_proj", "up_proj")):
            modules[name] = LoraPair(direction.float()[None], torch.full_like(pair.b, scale))
    return AdapterTensors.from_modules(1, 1.0, modules)


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


@pytest.fixture
def poisoned(client: httpx.Client, float32_server: Served, tmp_path: Path) -> Iterator[str]:
    """An adapter that is finite for every prompt but those that begin with FATAL."""
    source = lora.write_adapter(tmp_path / "poisoned", poisoned_adapter(float32_server.model_directory))
    answer = client.post("/kt/adapters", json={"name": "poisoned", "path": str(source)})
    assert answer.is_success, answer.text
    yield "poisoned"
    assert client.delete("/kt/adapters/poisoned").is_success


def test_a_request_that_overflows_ends_and_says_why(client: httpx.Client, poisoned: str) -> None:
    before = tokens(client)
    with KeepAsking(client) as base:
        for _ in range(10):
            answer = ask(client, [FATAL, 5, 6], poisoned)
            assert answer.status_code == 422, answer.text
            assert "adapter 'poisoned' computed numbers that are not finite" in answer.text
    assert base.answers == {tuple(before)}
    assert ask(client, PROMPT, poisoned).status_code == 200


def test_a_stream_that_overflows_ends_with_an_error_event(client: httpx.Client, poisoned: str) -> None:
    body = {"input_ids": [FATAL, 5, 6], "sampling_params": GREEDY, "lora_path": poisoned, "stream": True}
    with client.stream("POST", "/generate", json=body) as answer:
        lines = "".join(answer.iter_lines())
    assert "not finite" in lines
    assert tokens(client)


def test_a_stop_pattern_is_searched_in_linear_time_or_refused(client: httpx.Client) -> None:
    answer = ask(client, PROMPT, max_new_tokens=64, regex="a{64}", stop_regex="(a+)+b$")
    assert answer.status_code == 200, answer.text  # Python's `re` takes hours
    assert answer.json()["text"] == "a" * 64
    found = ask(client, PROMPT, max_new_tokens=64, regex="a{8}b{56}", stop_regex="a+b")
    assert found.json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": "a+b"}
    for pattern in ("(", r"(a)\1", "(?=a)", "(a{1000}){1000}"):
        assert ask(client, PROMPT, stop_regex=pattern).status_code == 400


def test_a_name_that_means_no_adapter_fails_its_requests_only(client: httpx.Client) -> None:
    before = tokens(client)
    wire = client.get("/kt/status").json()["wire_address"]
    channel = NamesChannel(wire.replace("/resident-", "/names-"))
    moved: list[Exception | None] = []
    try:
        channel.send("astray", "0" * 64, "no-such-copy", moved.append)
        deadline = time.monotonic() + 60
        while not moved and time.monotonic() < deadline:
            channel.poll()
    finally:
        channel.close()
    assert moved == [None]
    try:
        answer = ask(client, PROMPT, "astray")
        assert answer.status_code == 404
        assert "not installed any more ('no-such-copy')" in answer.text
    finally:
        client.delete("/kt/adapters/astray")
    assert tokens(client) == before


def test_sampling_beyond_what_is_allowed_is_refused_and_the_server_continues(client: httpx.Client) -> None:
    before = tokens(client)
    wrong: dict[str, Any] = {"top_k": 2**63, "n": 10**9, "stream_interval": 0, "repetition_penalty": 1e-300}
    wrong["logit_bias"] = {"5": 1e308}
    for name, value in wrong.items():
        assert ask(client, PROMPT, **{name: value}).status_code == 400, name
    assert tokens(client) == before
