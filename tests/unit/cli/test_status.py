"""`kt-runtime status` prints what the server says, and where a name has not moved."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kt_runtime.cli import status

REGISTRY = {
    "place": "/srv/registry",
    "replica": "host-30000-abc",
    "problem": None,
    "waiting_s": 0.0,
    "names": [
        {
            "name": "bob",
            "revision": 3,
            "version": "ab" * 32,
            "published_by": "other",
            "is_unpublished": False,
            "problem": None,
            "not_moved": [{"replica": "other", "revision": 2, "problem": "No space left on device", "silent_s": 1.0}],
        },
        {
            "name": "gone",
            "revision": 2,
            "version": None,
            "published_by": "other",
            "is_unpublished": True,
            "problem": "not stored",
            "not_moved": [],
        },
    ],
    "replicas": [
        {
            "replica": "host-30000-abc",
            "url": "http://a",
            "is_this": True,
            "behind": 0,
            "silent_s": 1,
            "clock_offset_s": 0,
        },
        {"replica": "other", "url": "http://b", "is_this": False, "behind": 1, "silent_s": 9, "clock_offset_s": -7.25},
    ],
}
STATUS = {
    "model": "tiny",
    "model_directory": "/models/tiny",
    "device": "cpu",
    "dtype": "bfloat16",
    "runtime_version": "0.1.0",
    "sglang_version": "0.5.23",
    "requests_in_flight": 2,
    "sessions": [],
    "adapters": {"bob": "id"},
    "fingerprint": "cd" * 32,
    "registry": REGISTRY,
}


def shown(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], *arguments: str) -> str:
    monkeypatch.setattr(status.ServerAPI, "get", lambda self, path: {"/kt/status": answer}[path])
    done = CliRunner().invoke(status.command, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_server_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(monkeypatch, STATUS | {"registry": None, "fingerprint": ""})
    assert "tiny (/models/tiny) on cpu, bfloat16" in said and "2 requests" in said and "not hashed yet" in said
    assert "registry" not in said


def test_ranks_with_their_experts_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: dict[str, Any] = {
        "rank": 1,
        "pid": 77,
        "first_expert": 4,
        "num_experts": 4,
        "rss_bytes": 3 << 30,
        "peak_bytes": 4 << 30,
    }
    rank |= {"dense_bytes": 1 << 30, "expert_bytes": 1 << 30, "host": 0, "address": "", "waiting_share": 0.25}
    ranks = [rank | {"is_slowest": True}]
    said = " ".join(shown(monkeypatch, STATUS | {"registry": None, "ranks": ranks}).split())
    assert "0 │ 77 │ 4 to 7 │ 2 GiB │ 3 GiB │ 4 GiB │ 25 %, the slowest" in said and "hosts" not in said
    ranks += [rank | {"rank": 2, "host": 1, "address": "10.0.0.2", "is_slowest": False}]
    said = " ".join(shown(monkeypatch, STATUS | {"registry": None, "ranks": ranks}).split())
    assert "2 ranks on 2 hosts: host 0 (), host 1 (10.0.0.2)" in said
    disk = {"directory": "/c/rank-1-of-2", "reading_stopped": None, "writing_stopped": "No space left on device"}
    said = " ".join(shown(monkeypatch, STATUS | {"registry": None, "ranks": [ranks[0] | {"disk": disk}]}).split())
    assert "rank 1: writing /c/rank-1-of-2 has stopped: No space left on device" in said


def test_replicas_and_where_a_name_has_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    said = " ".join(shown(monkeypatch, STATUS).split())
    assert "registry /srv/registry, this server is host-30000-abc" in said
    assert "host-30000-abc (this)" in said and "-7.2 s" in said and "9 s ago" in said
    assert "other (at revision 2)" in said and "No space left on device" in said
    assert "unloaded" in said and "not in the registry" in said and "cdcdcdcdcdcdcdcd" in said


def test_problems_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = REGISTRY | {"problem": "base.json is missing", "waiting_s": 31.0}
    said = shown(monkeypatch, STATUS | {"registry": broken})
    assert "registry: base.json is missing" in said and "has not answered for 31 s" in said


def test_json_is_the_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(shown(monkeypatch, STATUS, "--json")) == STATUS
