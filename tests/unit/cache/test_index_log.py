from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.cache_files import FaultyFiles

from kt_runtime.cache.index_log import DROP, PUT, USE, Change, IndexLog

PATH = Path("/cache/index.log")
CHANGES = [Change(PUT, 1, slot, bytes([slot]) * 16) for slot in range(20)] + [
    Change(USE, 0, 0, b"\x03" * 16),
    Change(DROP, 0, 0, b"\x04" * 16),
]


def files_with_log(*blocks: list[Change]) -> FaultyFiles:
    files = FaultyFiles()
    files.make_directory(PATH.parent)
    log = IndexLog(files, PATH, write=True)
    assert list(log.replay()) == []
    for block in blocks:
        log.append(block)
    log.close()
    return files


def replayed(files: FaultyFiles, *, write: bool = True) -> tuple[list[Change], IndexLog]:
    log = IndexLog(files, PATH, write=write)
    return [Change(*change) for change in log.replay()], log


def test_changes_come_back_in_order() -> None:
    files = files_with_log(CHANGES[:7], CHANGES[7:])
    changes, log = replayed(files)
    assert changes == CHANGES
    assert not log.is_damaged
    assert log.num_changes == len(CHANGES)
    log.append([Change(USE, 0, 0, b"\x01" * 16)])
    assert replayed(files)[0][-1][0] == USE


@given(st.integers(0, 1000))
def test_an_end_cut_off_costs_the_last_block_only(missing: int) -> None:
    files = files_with_log(CHANGES[:7], CHANGES[7:])
    data = files.files[PATH].data
    del data[len(data) - missing % len(data) :]
    size = len(data)
    changes, log = replayed(files)
    assert changes in ([], CHANGES[:7], CHANGES)
    assert not log.is_damaged
    log.append(CHANGES[:1])  # goes where the whole blocks end
    assert replayed(files)[0] == [*changes, CHANGES[0]]
    assert size or not changes


def test_damage_before_the_end_is_noticed() -> None:
    files = files_with_log(CHANGES[:7], CHANGES[7:])
    files.files[PATH].data[30] ^= 1
    _, log = replayed(files, write=False)
    assert log.is_damaged


def test_a_log_of_another_format_is_not_used() -> None:
    files = files_with_log(CHANGES)
    files.files[PATH].data[4] += 1
    assert replayed(files)[0] == []


def test_rewriting_leaves_no_history() -> None:
    files = files_with_log(CHANGES, CHANGES, CHANGES)
    _, log = replayed(files)
    before = log.size_bytes
    log.rewrite(CHANGES[:3])
    assert log.size_bytes < before
    log.append(CHANGES[3:5])
    assert replayed(files)[0] == CHANGES[:5]
    files.power_cut()
    assert replayed(files)[0] == CHANGES[:3]  # what was appended was not synced


def test_rewriting_that_fails_leaves_the_old_log() -> None:
    files = files_with_log(CHANGES)
    _, log = replayed(files)

    def fail(operation: str, path: Path) -> None:
        if operation == "rename":
            raise OSError(28, "No space left on device")

    files.before = fail
    with pytest.raises(OSError, match="No space"):
        log.rewrite(CHANGES[:1])
    files.before = lambda operation, path: None
    log.append(CHANGES[:1])
    assert replayed(files)[0] == [*CHANGES, CHANGES[0]]
