from __future__ import annotations

from pathlib import Path

import pytest

from kt_runtime.serve.memory import machine as module
from kt_runtime.serve.memory.machine import available_cpu_bytes, available_memory, huge_pages, total_cpu_bytes

MIB = 2**20


@pytest.fixture
def in_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were in the control group /a/b of both versions."""
    read = module._read_text
    lines = "0::/a/b\n4:cpu,memory:/a/b\n"
    monkeypatch.setattr(module, "_read_text", lambda path: lines if path == Path("/proc/self/cgroup") else read(path))


def write_group(group: Path, limit: str, usage: int, cache: int = 0, version: int = 2) -> None:
    group.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}[version]
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{usage}\n")
    (group / "memory.stat").write_text(
        f"anon 5\n{'inactive_file' if version == 2 else 'total_inactive_file'} {cache}\n"
    )


def test_without_a_limit_it_is_what_the_kernel_calls_available(tmp_path: Path, in_group: None) -> None:
    write_group(tmp_path / "a/b", "max", 5)
    assert 0 < available_cpu_bytes(tmp_path) <= total_cpu_bytes()
    assert available_memory(with_gpu=False).keys() == {"cpu"}


@pytest.mark.parametrize("group", ["a/b", "a", "."])
def test_the_limit_of_every_enclosing_group_counts(tmp_path: Path, in_group: None, group: str) -> None:
    write_group(tmp_path / group, str(50 * MIB), 20 * MIB)
    assert available_cpu_bytes(tmp_path) == 30 * MIB


def test_page_cache_can_be_given_back(tmp_path: Path, in_group: None) -> None:
    write_group(tmp_path / "a/b", str(50 * MIB), 20 * MIB, cache=15 * MIB)
    assert available_cpu_bytes(tmp_path) == 45 * MIB


def test_version_one_groups_count_too_and_their_no_limit_is_none(tmp_path: Path, in_group: None) -> None:
    write_group(tmp_path / "memory/a/b", str(50 * MIB), 20 * MIB, version=1)
    write_group(tmp_path / "memory/a", str(2**63 - 4096), 20 * MIB, version=1)
    assert available_cpu_bytes(tmp_path) == 30 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path, in_group: None) -> None:
    write_group(tmp_path / "a/b", str(20 * MIB), 30 * MIB)
    assert available_cpu_bytes(tmp_path) == 0


def test_huge_pages_are_in_bytes() -> None:
    pages = huge_pages()
    assert 0 <= pages["free_bytes"] <= pages["total_bytes"]
    assert pages["total_bytes"] % (2 * MIB) == 0
