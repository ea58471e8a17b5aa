from __future__ import annotations

from pathlib import Path

import pytest
from reference.cache.files import page_to_write

from kt_runtime.cache.directory import is_part_of_rank, numbers_of_ranks, part_of_rank, parts_of_ranks
from kt_runtime.cache.page_store import PageStore

MIB = 1 << 20


def store(path: Path) -> PageStore:
    return PageStore(path, MIB, bytes(16))


def test_one_rank_has_the_directory_itself_and_several_have_a_part_each() -> None:
    directory = Path("/cache")
    assert part_of_rank(directory, 0, 1) == directory
    assert [part_of_rank(directory, rank, 2) for rank in (0, 1)] == [
        directory / "rank-0-of-2",
        directory / "rank-1-of-2",
    ]


@pytest.mark.parametrize("name", ["rank-01-of-2", "rank-1-of-0", "rank-1-of-2.old", "rank-1", "segments"])
def test_other_names_are_no_parts(name: str) -> None:
    assert not is_part_of_rank(name)


def test_parts_are_found_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 9, 0):
        store(part_of_rank(tmp_path, rank, 11)).close()
    (tmp_path / "rank-1-of-11").mkdir()  # no cache is in it
    assert [path.name for path in parts_of_ranks(tmp_path)] == ["rank-0-of-11", "rank-9-of-11", "rank-10-of-11"]


def test_a_directory_holds_what_has_records_or_a_process_that_writes(tmp_path: Path) -> None:
    assert numbers_of_ranks(tmp_path) == set()
    opened = store(part_of_rank(tmp_path, 1, 2))
    assert numbers_of_ranks(tmp_path) == {2}
    opened.close()
    assert numbers_of_ranks(tmp_path) == set()  # others may use it
    opened = store(part_of_rank(tmp_path, 1, 2))
    opened.write([page_to_write(1)])
    opened.close()
    alone = store(tmp_path)
    assert numbers_of_ranks(tmp_path) == {1, 2}
    alone.close()
    assert numbers_of_ranks(tmp_path) == {2}
