"""What the server may hold of adapters: names and bytes on disk, with the value and what is allowed in the refusal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.lora import write_adapter
from reference.resident.desk import Desk

from kt_runtime.errors import LimitError
from kt_runtime.resident.publishing import holdings
from kt_runtime.resident.publishing.holdings import Holdings, bytes_below


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusal_of_disk(held: Holdings) -> str:
    """Once what was measured is decided."""
    held.decide(held.measured_bytes)
    try:
        held.check_disk("adapter 'bob'")
    except LimitError as error:
        return str(error)
    return ""


def test_a_name_more_than_allowed_is_refused_and_a_new_version_is_not(desk: Desk, tmp_path: Path) -> None:
    desk.publisher.holdings = Holdings(tmp_path, max_names=2)
    desk.publish("bob", 1)
    desk.publish("alice", 2)  # waits; it counts already
    refused = r"adapter 'eve': 2 adapters are there; allowed are 2 \(--max-adapters\)"
    with pytest.raises(LimitError, match=refused):
        desk.publish("eve", 3)
    write_adapter(tmp_path / "eve", desk.adapter(3))
    with pytest.raises(LimitError, match=refused):
        desk.publisher.load("eve", str(tmp_path / "eve"), desk.outcomes.append)
    desk.publish("bob", 4)
    desk.settle()
    assert not [outcome for outcome in desk.outcomes if isinstance(outcome, Exception)]
    desk.forget("alice")
    desk.publish("eve", 3)
    desk.settle()
    assert {info.name for info in desk.publisher.adapters()} == {"bob", "eve"}


def test_a_full_allowance_of_disk_refuses_what_would_be_written_until_files_are_removed(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "PAUSE_SECONDS", 0.01)
    desk.publish("bob", 1)
    desk.settle()
    desk.written()
    root = desk.store.root
    held = desk.publisher.holdings = Holdings(root, max_bytes=bytes_below(root))
    until(lambda: refusal_of_disk(held))
    assert f"{root} has {bytes_below(root)} bytes; allowed are {bytes_below(root)} (--max-adapter-disk)" in (
        refusal_of_disk(held)
    )
    with pytest.raises(LimitError, match="adapter 'bob': "):
        desk.publish("bob", 2)
    assert desk.current("bob") == desk.outcomes[0].hash
    assert held.is_inside(root / ".tinker" / "run") and not held.is_inside(tmp_path / "elsewhere")
    (version,) = root.glob("bob/*/adapter_model.safetensors")
    version.unlink()
    until(lambda: not refusal_of_disk(held))
    desk.publish("bob", 2)
    desk.settle()
    assert desk.current("bob") == desk.outcomes[-1].hash


def test_only_files_count_and_what_can_not_be_read_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / "other").write_bytes(b"1234567")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "a" / "pipe")
    assert bytes_below(tmp_path) == 12
    assert bytes_below(tmp_path / "none") == 0
