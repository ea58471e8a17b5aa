"""Residents of several ranks: rank 0 has the wire server, the others follow what it decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from reference.lora import random_adapter, write_adapter
from reference.resident.engine import LORA, Engine, sessions_of, train

from kt_runtime.errors import KtError, NotFoundError
from kt_runtime.resident.handlers import RanksDiffer
from kt_runtime.resident.server import Resident


def test_every_rank_does_what_rank_0_decides(make_host: Callable[..., Any], tmp_path: Path) -> None:
    """Rank 1 sees payloads alone: no socket, no clock, no frontend."""
    host, other = make_host(), make_host()
    host.num_ranks = other.num_ranks = 2
    (tmp_path / "0").mkdir()
    engine = Engine(host, tmp_path / "0")
    follower = Resident(other, msgspec.structs.replace(engine.settings, adapter_directory=str(tmp_path / "1")), None)
    try:
        with engine.client() as client:
            client.create_session("a", LORA)
            train(client, "a", 2)
            published = client.publish("a", "bob")
    finally:
        engine.close()
    for payload in engine.payloads:
        follower.apply(payload)
        follower.turn()
    ours = sessions_of(engine.resident)["a"].parameters
    theirs = sessions_of(follower)["a"].parameters
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert set(other.installed) == {published.lora_id}
    assert [info.current for info in follower.publisher.adapters()] == [published.version]
    follower.close()


def test_a_rank_that_can_not_prepare_what_rank_0_has_does_not_go_on(
    make_host: Callable[..., Any], tmp_path: Path
) -> None:
    """Requests for the adapter would come to it, and the ranks' batches would differ."""
    host, other = make_host(), make_host()
    host.num_ranks = other.num_ranks = 2
    (tmp_path / "0").mkdir()
    path = write_adapter(tmp_path / "saved", random_adapter(host.config, rank=4, alpha=8.0, seed=0))
    engine = Engine(host, tmp_path / "0")
    follower = Resident(other, engine.settings, None)
    try:
        with engine.client() as client:
            client.load_adapter("bob", str(path))
    finally:
        engine.close()
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(KtError, match="saved"):
        for payload in engine.payloads:
            follower.apply(payload)
    follower.close()


def test_a_rank_that_can_not_load_what_rank_0_has_does_not_go_on(make_host: Callable[..., Any], tmp_path: Path) -> None:
    """It would train other numbers than the others."""
    host, other = make_host(), make_host()
    host.num_ranks = other.num_ranks = 2
    (tmp_path / "0").mkdir()
    engine = Engine(host, tmp_path / "0")
    follower = Resident(other, engine.settings, None)
    try:
        with engine.client() as client:
            client.create_session("a", LORA)
            with pytest.raises(NotFoundError):  # of all ranks
                client.load("a", str(tmp_path / "absent"))
            client.save("a", str(tmp_path / "saved"))
            client.load("a", str(tmp_path / "saved"))
    finally:
        engine.close()
    next((tmp_path / "saved").glob("adapter_model*")).unlink()
    with pytest.raises(RanksDiffer, match=r"rank 0 has done this, and this rank can't: .*saved"):
        for payload in engine.payloads:
            follower.apply(payload)
            follower.turn()
    follower.close()
