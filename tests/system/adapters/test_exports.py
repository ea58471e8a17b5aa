"""A served adapter leaves a real float32 server in every form, and means the same there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from reference import lora
from reference.server import greedy

from kt_runtime.adapters import AdapterTensors, content_hash, read_adapter
from kt_runtime.cli.main import main
from kt_runtime.families import family_for

NEW_TOKENS = 12
TOLERANCE = 1e-4  # of a log-probability: float32, sums in another order; 1.1e-5 measured (AVX-512), 9.5e-6 (AVX2)
PROMPTS = [[3 + (7 * index + 11 * step) % 690 for step in range(length)] for index, length in enumerate((5, 17, 40))]
NAME = "exported"


@dataclass(frozen=True)
class Loaded:
    server: Any
    config: dict[str, Any]
    adapter: AdapterTensors
    directory: Path

    def answers(self, name: str) -> list[dict[str, Any]]:
        return greedy.generate(self.server.api, PROMPTS, NEW_TOKENS, logprob_start_len=0, lora_path=[name] * 3)

    def export(self, *arguments: str | Path) -> None:
        assert main(["adapter", "export", NAME, *map(str, arguments), "--url", self.server.api.url]) == 0


@pytest.fixture(scope="module")
def loaded(float32_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """All that GGUF can express too, which is all but DeepSeek's kv_b_proj. An older version is there as well."""
    config = json.loads((float32_server.model_directory / "config.json").read_text())
    targets = ["q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"]
    place = tmp_path_factory.mktemp("exports")
    only = [*targets, "mlp", "shared", "experts"]
    for number, seed in enumerate((8, 9)):
        adapter = lora.random_adapter(config, rank=8, alpha=12.0, seed=seed, only=only)
        directory = lora.write_adapter(place / str(number), adapter)
        float32_server.api.post("/kt/adapters", {"name": NAME, "path": str(directory)})
    yield Loaded(float32_server, config, adapter, place)
    float32_server.api.delete(f"/kt/adapters/{NAME}")


def read(loaded: Loaded, path: Path) -> AdapterTensors:
    return read_adapter(path, family_for(loaded.config), loaded.config, 8)


def test_the_merged_checkpoint_answers_as_the_served_adapter_does(loaded: Loaded, tmp_path: Path) -> None:
    loaded.export(tmp_path / "merged", "--format", "merged", "--dtype", "float32")
    model = greedy.load_hugging_face(tmp_path / "merged")
    answers = loaded.answers(NAME)
    expected = [
        greedy.expected_of(model, prompt, answer["output_ids"]) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    largest = max(greedy.check(answer, case, TOLERANCE) for answer, case in zip(answers, expected, strict=True))
    print(f"{loaded.server.preset}: largest difference of a logprob {largest:.1e}")
    base = greedy.load_hugging_face(loaded.server.model_directory)
    assert greedy.hugging_face(base, PROMPTS[0], NEW_TOKENS).tokens != expected[0].tokens


def test_merged_in_bf16_it_differs_by_the_rounding_of_the_weights_alone(loaded: Loaded, tmp_path: Path) -> None:
    loaded.export(tmp_path / "merged", "--format", "merged")
    by_hand = lora.merge(greedy.load_hugging_face(loaded.server.model_directory), loaded.adapter)
    rounded = greedy.load_hugging_face(tmp_path / "merged")
    for name, parameter in by_hand.named_parameters():
        # Half a step of bf16. The sums before it differ too: by 9.9e-9 in weights near 0.
        torch.testing.assert_close(rounded.get_parameter(name), parameter, rtol=2.0**-8, atol=5e-8, msg=name)


def test_peft_and_an_older_version_come_out_as_they_went_in(loaded: Loaded, tmp_path: Path) -> None:
    loaded.export(tmp_path / "peft")
    assert content_hash(read(loaded, tmp_path / "peft")) == content_hash(read(loaded, loaded.directory / "1"))
    versions = loaded.server.api.get(f"/kt/adapters/{NAME}")["versions"]
    loaded.export(tmp_path / "older", "--version", versions[1]["version"][:12])
    assert content_hash(read(loaded, tmp_path / "older")) == content_hash(read(loaded, loaded.directory / "0"))
    assert (
        main(["adapter", "export", NAME, str(tmp_path / "x"), "--version", "00", "--url", loaded.server.api.url]) == 2
    )


def test_as_a_gguf_file_it_is_served_under_another_name_with_the_same_answers(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    loaded.export(path, "--format", "gguf")
    assert main(["adapter", "load", "from-gguf", str(path), "--url", loaded.server.api.url]) == 0
    try:
        ours, theirs = loaded.answers(NAME), loaded.answers("from-gguf")
        assert [answer["output_ids"] for answer in theirs] == [answer["output_ids"] for answer in ours]
        versions = {row["name"]: row["current"] for row in loaded.server.api.get("/kt/adapters")["adapters"]}
        assert versions["from-gguf"] == versions[NAME]  # the same content has the same hash
        (tmp_path / "broken.gguf").write_bytes(path.read_bytes()[:-100])
        body = {"name": "from-gguf", "path": str(tmp_path / "broken.gguf")}
        answer = httpx.post(f"{loaded.server.api.url}/kt/adapters", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 400 and "truncated" in answer.json()["error"]["message"]
    finally:
        loaded.server.api.delete("/kt/adapters/from-gguf")
