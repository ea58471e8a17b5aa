"""Two hosts train with the bits of one process: losses, log-probabilities, norms, versions, answers, a checkpoint's
files; and they continue from its checkpoint and from their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.ranks import network
from system.ranks.test_training import continued, running, trained
from system.ranks.two_hosts import end_by, pair, ready

from kt_runtime.serve.models.make_model import make_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=6)
    return tmp_path


def test_two_hosts_train_with_the_bits_of_one_process(directory: Path, ends: tuple[network.End, network.End]) -> None:
    with running(directory, "one", "--dtype", "bfloat16") as api:
        expected = trained(api, directory, "one")
        further = continued(api, directory / "one")
    with pair(directory, ends, "two-adapters", "--exact") as hosts:
        ready(hosts)
        found = trained(hosts.api, directory, "two")
        for name, value in expected.items():
            assert found[name] == value, name
        assert continued(hosts.api, directory / "one") == further
        assert continued(hosts.api, directory / "two") == further
        end_by("rank 0 killed", hosts, ends)
