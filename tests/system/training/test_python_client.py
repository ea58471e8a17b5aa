"""The methods of `ResidentClient` that no command calls, on a running server: who writes Python calls them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.place import Place
from reference.server.greedy import Answer, ask

from kt_runtime.cli.connection import resident_client
from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.wire import Batch, LoraSettings, ResidentClient
from kt_runtime.wire.replies import AdapterInfo

pytestmark = pytest.mark.preset("tiny-qwen3-moe")
SESSION, NAME = "python", "from-python"
PROMPT = [9, 8, 7, 6, 5]


@pytest.fixture
def client(float32_server: Any) -> Iterator[ResidentClient]:
    """With an open session SESSION. No adapter NAME is left afterwards, and the settings are as before."""
    with resident_client(float32_server.api) as client:
        before = client.change_settings()
        client.create_session(SESSION, LoraSettings(rank=4, alpha=8.0, targets=["all"], seed=5))
        try:
            yield client
        finally:
            client.close_session(SESSION)
            if adapter(client) is not None:
                float32_server.api.delete(f"/kt/adapters/{NAME}")
            share, target = before.train_share, before.ttft_target_ms
            client.change_settings(train_share=share, ttft_target_ms=target, weights={SESSION: None})
            assert client.change_settings() == before


def adapter(client: ResidentClient) -> AdapterInfo | None:
    """NAME, if it is served."""
    found = (each for each in client.list_adapters() if each.name == NAME and each.current is not None)
    return next(found, None)


def rows() -> Batch:
    tokens = np.random.default_rng(3).integers(3, 700, (6, 65)).tolist()
    return Batch.from_sequences([row[:-1] for row in tokens], [row[1:] for row in tokens])


def step(client: ResidentClient) -> None:
    client.forward_backward(SESSION, rows())
    client.optim_step(SESSION, 0.02)


def check_same(place: Place, found: Answer, expected: Answer) -> None:
    assert found[0] == expected[0]
    place.check_same(found[1], expected[1])


def test_changed_settings_are_in_the_status_and_cut_the_next_step(client: ResidentClient, float32_server: Any) -> None:
    before = client.change_settings()
    step(client)
    whole = client.status().training_turns
    found = client.change_settings(ttft_target_ms=0.1, train_share=0.25, weights={SESSION: 2})
    assert (found.ttft_target_ms, found.train_share, found.weights) == (0.1, 0.25, before.weights | {SESSION: 2.0})
    assert client.change_settings() == found
    step(client)
    turns = client.status().training_turns
    assert whole is not None and turns is not None and whole.settings == before
    assert turns.settings == found and turns.parts > whole.parts
    assert float32_server.api.get("/kt/settings")["ttft_target_ms"] == 0.1
    with pytest.raises(InvalidValueError, match="train_share 7"):
        client.change_settings(ttft_target_ms=20, train_share=7)
    with pytest.raises(UnknownNameError, match="ttft_target"):
        client.change_settings(ttft_target=20)
    assert client.change_settings() == found, "nothing of a refused change counts"


def test_forward_has_the_numbers_of_forward_backward_and_changes_nothing(client: ResidentClient, place: Place) -> None:
    def check(found: Any, expected: Any) -> None:
        place.check_losses([found.loss], [expected.loss])
        place.check_same(np.concatenate(found.logprobs), np.concatenate(expected.logprobs))
        assert (found.num_tokens, found.num_correct) == (expected.num_tokens, expected.num_correct)

    base = client.forward(SESSION, rows(), model="base")
    with pytest.raises(ConflictError):
        client.optim_step(SESSION, 0.02)  # no gradient
    step(client)
    policy = client.forward(SESSION, rows())
    check(policy, client.forward_backward(SESSION, rows()))
    check(client.forward(SESSION, rows()), policy)
    check(client.forward(SESSION, rows(), model="base"), base)
    assert policy.loss < base.loss and [len(row) for row in policy.logprobs] == [64] * 6


def test_a_loaded_adapter_is_listed_and_a_rollback_gives_the_answers_of_before(
    client: ResidentClient, float32_server: Any, place: Place, tmp_path: Path
) -> None:
    api = float32_server.api
    answers = [ask(api, PROMPT)]
    versions, lora_ids = [], []
    for number in (1, 2):
        step(client)
        path = str(tmp_path / str(number))
        client.save(SESSION, path, optimizer=False)
        loaded = client.load_adapter(NAME, path)
        listed = adapter(client)
        assert listed is not None and loaded.name == NAME and loaded.publish_ms > 0
        assert listed.current == loaded.version and listed.owner is None
        newest = listed.versions[0]
        assert (newest.version, newest.lora_id, newest.source) == (loaded.version, loaded.lora_id, path)
        assert (newest.rank, newest.alpha, len(listed.versions)) == (4, 8.0, number)
        versions.append(loaded.version)
        lora_ids.append(loaded.lora_id)
        answers.append(ask(api, PROMPT, NAME))
    base, first, second = answers
    assert base[1] != first[1] != second[1] and len(set(versions)) == len(set(lora_ids)) == 2

    assert client.rollback_adapter(NAME).version == versions[0]
    listed = adapter(client)
    assert listed is not None and listed.current == versions[0] and len(listed.versions) == 2
    check_same(place, ask(api, PROMPT, NAME), first)
    assert client.rollback_adapter(NAME, versions[1][:12]).version == versions[1]
    check_same(place, ask(api, PROMPT, NAME), second)
    with pytest.raises(UnknownNameError):
        client.rollback_adapter(NAME, "no-version")
    check_same(place, ask(api, PROMPT, NAME), second)


def test_loading_takes_a_session_s_name_only_if_asked_to(client: ResidentClient, tmp_path: Path) -> None:
    step(client)
    client.save(SESSION, str(tmp_path / "saved"))
    published = client.publish(SESSION, NAME).version
    step(client)
    client.save(SESSION, str(tmp_path / "later"))
    with pytest.raises(ConflictError, match=SESSION):
        client.load_adapter(NAME, str(tmp_path / "later"))
    listed = adapter(client)
    assert listed is not None and (listed.current, listed.owner) == (published, SESSION)
    taken = client.load_adapter(NAME, str(tmp_path / "later"), take_over=True).version
    listed = adapter(client)
    assert listed is not None and (listed.current, listed.owner) == (taken, None) and taken != published
    with pytest.raises(ConflictError, match=NAME):
        client.publish(SESSION, NAME)
