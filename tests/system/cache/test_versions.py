"""Pages of the prefix cache belong to an adapter's content: in every tier, after a restart too, whoever has the content
finds them, and no other version does, whatever name, id or key it comes under."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

PRESET = "tiny-deepseek-v3"
PROMPT_TOKENS, CACHED_TOKENS = 200, 192  # whole pages of 16; the last token is always computed
NEW_TOKENS = 12
EDGES = [3 + step for step in range(30)]  # of the device-only server: pages of 8


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, num_tokens).tolist()


SHARED = prompt(1)


def train(client: ResidentClient, session: str, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(3, 700, (4, 33)).tolist()
    client.forward_backward(session, Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens]))
    client.optim_step(session, 0.05)


def generate(
    api: ServerAPI, ids: list[int], adapter: str | None = None, new_tokens: int = NEW_TOKENS, **more: Any
) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return api.post("/generate", {"input_ids": ids, "sampling_params": sampling, "lora_path": adapter, **more})


def cached(answer: Any) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def lora_id(api: ServerAPI, name: str) -> str:
    described = api.get("/kt/adapters")["adapters"]
    (found,) = [each for each in described if each["name"] == name]
    (current,) = [each for each in found["versions"] if each["version"] == found["current"]]
    return str(current["lora_id"])


@dataclass
class Story:
    """`answers` by what was asked; `raw`: /generate's own, by the same. `versions`: hashes of the three versions."""

    answers: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, cached_server: Any) -> Story:
    """One server, and it again after a restart."""
    place = tmp_path_factory.mktemp("versions")
    told = Story()
    with cached_server(PRESET, place) as served, resident_client(served.api) as client:
        _retrain_and_roll_back(told, served, client)
        _ask_under_another_name(told, served)
        _ask_by_key(told, served)
    with cached_server(PRESET, place) as served, resident_client(served.api) as client:
        _ask_after_a_restart(told, served, client)
    return told


def _publish(told: Story, client: ResidentClient, session: str, seed: int) -> None:
    train(client, session, seed)
    told.versions.append(client.publish(session, "moving").version)


def _retrain_and_roll_back(told: Story, served: Any, client: ResidentClient) -> None:
    client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
    _publish(told, client, "s", 1)
    told.answers["first cold"] = served.ask(SHARED, "moving")
    told.answers["first again"] = served.ask(SHARED, "moving")
    _publish(told, client, "s", 2)
    told.answers["second cold"] = served.ask(SHARED, "moving")
    served.api.post("/kt/adapters/moving/rollback", {})
    told.answers["rolled back"] = served.ask(SHARED, "moving")
    served.api.post("/kt/adapters/moving/rollback", {"version": told.versions[1]})
    told.answers["rolled forward"] = served.ask(SHARED, "moving")


def _ask_under_another_name(told: Story, served: Any) -> None:
    directory = served.place / "adapters" / "moving" / told.versions[0]
    served.api.post("/kt/adapters", {"name": "copy", "path": str(directory)})
    told.answers["copy on device"] = served.ask(SHARED, "copy")
    served.flush_device()
    told.answers["copy on host"] = served.ask(SHARED, "copy")
    served.flush_memory()
    told.answers["copy on disk"] = served.ask(SHARED, "copy")
    served.flush_memory()
    told.answers["second on disk"] = served.ask(SHARED, "moving")


def _ask_by_key(told: Story, served: Any) -> None:
    """Of the base model, with keys under which the adapter's pages are kept, or were by SGLang alone."""
    told.raw["base"] = generate(served.api, SHARED)
    for name, key in (("id", lora_id(served.api, "copy")), ("content", f"kt1|{told.versions[0]}|-")):
        told.raw[f"base by {name}"] = generate(served.api, SHARED, extra_key=key)
    told.raw["salted"] = generate(served.api, SHARED, "copy", cache_salt="salt")
    told.raw["keyed"] = generate(served.api, SHARED, "copy", extra_key="mine")
    told.raw["keyed again"] = generate(served.api, SHARED, "copy", extra_key="mine")
    told.raw["keyed, other version"] = generate(served.api, SHARED, "moving", extra_key="mine")


def _ask_after_a_restart(told: Story, served: Any, client: ResidentClient) -> None:
    told.answers["restarted"] = served.ask(SHARED, "moving")
    served.api.post("/kt/adapters/moving/rollback", {"version": told.versions[0]})
    told.answers["restarted, rolled back"] = served.ask(SHARED, "moving")
    served.flush_memory()
    told.answers["restarted, copy"] = served.ask(SHARED, "copy")
    directory = served.place / "adapters" / "moving" / told.versions[1]
    client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1), start_from=str(directory))
    _publish(told, client, "s", 3)
    told.answers["third cold"] = served.ask(SHARED, "moving")


NOTHING = {"device": 0, "host": 0, "disk": 0, "computed": PROMPT_TOKENS}


def from_tier(tier: str) -> dict[str, int]:
    return NOTHING | {tier: CACHED_TOKENS, "computed": PROMPT_TOKENS - CACHED_TOKENS}


@pytest.mark.parametrize("version", ["first", "second", "third"])
def test_a_retrained_adapter_uses_no_page_of_the_versions_before(story: Story, version: str) -> None:
    """The second's are looked up while the first's are in all tiers; the third's while both are on the disk."""
    assert len(set(story.versions)) == 3
    assert story.answers[f"{version} cold"].tiers == NOTHING
    others = {"first", "second", "third"} - {version}
    assert all(story.answers[f"{version} cold"].logprobs != story.answers[f"{each} cold"].logprobs for each in others)


@pytest.mark.parametrize(
    ("asked", "version", "tier"),
    [
        ("first again", "first", "device"),
        ("rolled back", "first", "device"),
        ("rolled forward", "second", "device"),
        ("copy on device", "first", "device"),
        ("copy on host", "first", "host"),
        ("copy on disk", "first", "disk"),
        ("second on disk", "second", "disk"),
        ("restarted", "second", "disk"),
        ("restarted, rolled back", "first", "disk"),
        ("restarted, copy", "first", "disk"),
    ],
)
def test_a_version_finds_its_own_pages_under_every_name(story: Story, asked: str, version: str, tier: str) -> None:
    found, cold = story.answers[asked], story.answers[f"{version} cold"]
    assert found.tiers == from_tier(tier)
    assert found.tokens == cold.tokens
    assert found.logprobs == cold.logprobs


@pytest.mark.parametrize("key", ["id", "content"])
def test_a_client_cannot_ask_the_base_model_with_an_adapters_pages(story: Story, key: str) -> None:
    answer = story.raw[f"base by {key}"]
    assert cached(answer) == 0
    assert answer["output_ids"] == story.raw["base"]["output_ids"]


def test_a_clients_own_key_separates_and_does_not_join_versions(story: Story) -> None:
    assert cached(story.raw["salted"]) == cached(story.raw["keyed"]) == cached(story.raw["keyed, other version"]) == 0
    assert cached(story.raw["keyed again"]) == CACHED_TOKENS
    first, second = (story.answers[f"{version} cold"].tokens for version in ("first", "second"))
    for asked in ("salted", "keyed", "keyed again"):
        assert story.raw[asked]["output_ids"] == first
    assert story.raw["keyed, other version"]["output_ids"] == second


def test_without_further_tiers_pages_follow_the_content_too(float32_server: Any, tmp_path: Path) -> None:
    """Pages of 8 tokens in the device pool alone, for both kinds of attention; several samples share a prefix."""
    api = float32_server.api
    with resident_client(api) as client:
        client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
        train(client, "s", 1)
        client.publish("s", "moving")
        client.save("s", str(tmp_path / "saved"))
        first = generate(api, EDGES, "moving")
        train(client, "s", 2)
        client.publish("s", "moving")
        second = generate(api, EDGES, "moving")
        api.post("/kt/adapters/moving/rollback", {})
        back = generate(api, EDGES, "moving")
        api.post("/kt/adapters", {"name": "copy", "path": str(tmp_path / "saved")})
        copy = generate(api, EDGES, "copy")
        by_id = generate(api, EDGES, extra_key=lora_id(api, "copy"))
        body = {"input_ids": EDGES, "lora_path": "copy", "sampling_params": {"n": 3, "max_new_tokens": 1}}
        samples = api.post("/generate", body)
        client.close_session("s")
        for name in ("moving", "copy"):
            api.delete(f"/kt/adapters/{name}")
    assert [cached(each) for each in (first, second, back, copy, by_id)] == [0, 0, 24, 24, 0]
    assert [cached(each) for each in samples] == [24, 24, 24]
    assert first["output_ids"] == back["output_ids"] == copy["output_ids"] != by_id["output_ids"]


def test_a_streaming_session_keeps_its_pages_until_its_version_changes(tmp_path: Path) -> None:
    """The second turn has the first one's content under another name, the third has another version's."""
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    options = ["--dtype", "float32", "--max-total-tokens", "1024", "--adapter-dir", str(tmp_path / "adapters")]
    passed_on = ["--", "--enable-streaming-session"]
    turns = [prompt(21, 64), prompt(22, 32), prompt(23, 32)]
    history: list[int] = []
    answers = []
    with (
        server(str(tmp_path / "model"), [*options, *passed_on], tmp_path / "log") as api,
        resident_client(api) as client,
    ):
        client.create_session("s", LoraSettings(rank=4, alpha=8.0, seed=1))
        for name, seed in (("one", 1), ("two", 2)):
            train(client, "s", seed)
            client.publish("s", name)
            if name == "one":
                client.publish("s", "copy")
        session = api.post("/open_session", {"capacity_of_str_len": 10_000, "streaming": True})
        for ids, name in zip(turns, ("one", "copy", "two"), strict=True):
            history += ids
            answers.append(generate(api, ids, name, session_params={"id": session}))
            if name != "two":
                history += answers[-1]["output_ids"]
        alone = generate(api, history, "two", extra_key="alone")
    assert cached(answers[1]) >= 64
    assert cached(answers[2]) == cached(alone) == 0
    assert answers[2]["output_ids"] == alone["output_ids"]
