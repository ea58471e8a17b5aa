"""Adapters on a real server in float32, against Hugging Face with the same adapter merged."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from reference import lora
from reference.place import Place
from transformers import AutoModelForCausalLM

from kt_runtime.adapters import AdapterTensors
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError
from kt_runtime.serve.models.make_model import make_model

NEW_TOKENS = 12
LOGPROB_TOLERANCE = 1.1e-4  # float32, sums in another order; 1.1e-5 measured with AVX-512, 2.3e-5 with AVX2
PROMPTS = [[3 + (7 * index + 11 * step) % 690 for step in range(length)] for index, length in enumerate((5, 17, 40))]
# What each adapter changes: groups or projections; everything if empty. Ranks below and at the server's 8.
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "all": (8, ()),
    "attention": (4, ("attention",)),
    "experts": (8, ("experts",)),
    "mlps": (2, ("mlp", "shared", "experts")),
    "halves": (
        4,
        ("q_proj", "q_a_proj", "kv_b_proj", "up_proj"),
    ),  # parts of fused linears
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Served:
    api: ServerAPI
    model: torch.nn.Module
    adapters: dict[str, AdapterTensors]
    directory: Path
    tolerance: float
    place: Place

    def generate(self, requests: Sequence[tuple[str | None, list[int]]], tokens: int = NEW_TOKENS) -> list[Answer]:
        """One HTTP request, which SGLang runs as one batch: (adapter, prompt) pairs."""
        body = {
            "input_ids": [prompt for _, prompt in requests],
            "lora_path": [adapter for adapter, _ in requests],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        return [
            Answer(answer["output_ids"], [item[0] for item in answer["meta_info"]["output_token_logprobs"]])
            for answer in self.api.post("/generate", body)
        ]

    def load(self, name: str, adapter: AdapterTensors, reference: ModuleType) -> None:
        directory = reference.write_adapter(self.directory / f"{name}-{len(list(self.directory.iterdir()))}", adapter)
        self.api.post("/kt/adapters", {"name": name, "path": str(directory)})


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return lora


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: ModuleType, place: Place
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("server")
    make_model(request.param, directory / "model", seed=1)
    config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    adapters = {
        name: reference.random_adapter(config, rank=rank, alpha=12.0, seed=seed, only=only)
        for seed, (name, (rank, only)) in enumerate(PARTS.items())
    }
    (directory / "sources").mkdir()
    options = ["--dtype", "float32", "--max-lora-rank", "8", "--lora-slots", "4"]
    arguments = place.arguments([*options, "--adapter-dir", str(directory / "adapters")])
    with server(str(directory / "model"), arguments, directory / "server.log") as api:
        tolerance = LOGPROB_TOLERANCE * place.float32_factor
        started = Served(api, model, adapters, directory / "sources", tolerance, place)
        for name, adapter in adapters.items():
            source = reference.write_adapter(directory / "sources" / name, adapter)
            api.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(source)})
        yield started


@torch.no_grad()
def hugging_face(model: torch.nn.Module, prompt: list[int], tokens: int = NEW_TOKENS) -> Answer:
    ids, logprobs = list(prompt), []
    for _ in range(tokens):
        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return Answer(ids[len(prompt) :], logprobs)


def assert_same(served: Served, found: Answer, expected: Answer) -> float:
    assert found.tokens == expected.tokens
    difference = max(abs(one - other) for one, other in zip(found.logprobs, expected.logprobs, strict=True))
    assert difference <= served.tolerance
    return difference


def check_served_twice(served: Served, found: Answer, expected: Answer) -> None:
    """In another batch, or again: on a CPU the bits are equal."""
    assert found.tokens == expected.tokens
    served.place.check_same(found.logprobs, expected.logprobs)


@pytest.mark.parametrize("name", [None, *PARTS])
def test_an_adapter_answers_as_its_merged_weights_do(served: Served, reference: ModuleType, name: str | None) -> None:
    model = copy.deepcopy(served.model)
    if name is not None:
        reference.merge(model, served.adapters[name])
    answers = served.generate([(name, prompt) for prompt in PROMPTS])
    expected = [hugging_face(model, prompt) for prompt in PROMPTS]
    differences = [assert_same(served, *pair) for pair in zip(answers, expected, strict=True)]
    print(f"{name}: largest difference of logprobs {max(differences):.1e}")
    if name is not None:
        assert [answer.tokens for answer in answers] != [
            hugging_face(served.model, prompt).tokens for prompt in PROMPTS
        ]


def test_adapters_and_base_in_one_batch_answer_as_each_does_alone(served: Served) -> None:
    requests = [(name, prompt) for prompt in PROMPTS for name in (None, "all", "experts", "attention")]
    alone = [served.generate([request])[0] for request in requests]
    for together, single in zip(served.generate(requests), alone, strict=True):
        check_served_twice(served, together, single)


def test_more_adapters_than_slots_answer_as_each_does_alone(served: Served) -> None:
    requests = [(name, prompt) for prompt in PROMPTS for name in (*PARTS, None)]
    alone = [served.generate([request])[0] for request in requests]
    for together, single in zip(served.generate(requests), alone, strict=True):
        check_served_twice(served, together, single)


def test_a_new_version_never_reads_the_old_versions_cache(served: Served, reference: ModuleType) -> None:
    prompt = PROMPTS[2]
    for name in ("experts", "all", "attention"):
        served.load("moving", served.adapters[name], reference)
        expected = hugging_face(reference.merge(copy.deepcopy(served.model), served.adapters[name]), prompt)
        for _ in range(2):  # the second one hits the cache
            assert_same(served, served.generate([("moving", prompt)])[0], expected)


def test_unloading_lets_running_requests_end(served: Served, reference: ModuleType) -> None:
    served.load("leaving", served.adapters["all"], reference)
    expected = served.generate([("leaving", PROMPTS[1])], tokens=160)[0]
    answers: list[Any] = []
    running = threading.Thread(
        target=lambda: answers.extend(served.generate([("leaving", PROMPTS[1])] * 2, tokens=160)), daemon=True
    )
    running.start()
    wait_until_used(served.api, "leaving")
    served.api.delete("/kt/adapters/leaving")
    running.join(timeout=120)
    assert [answer.tokens for answer in answers] == [expected.tokens] * 2
    with pytest.raises(KtError):
        served.generate([("leaving", PROMPTS[1])])
    check_served_twice(served, served.generate([("all", PROMPTS[1])], tokens=160)[0], expected)


def wait_until_used(api: ServerAPI, name: str) -> None:
    for _ in range(1000):
        listed = {adapter["name"]: adapter for adapter in api.get("/kt/adapters")["adapters"]}
        if any(version["in_flight"] for version in listed[name]["versions"]):
            return
    raise AssertionError(f"no request was seen to use {name!r}")
