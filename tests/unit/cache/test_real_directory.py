"""Against a real file system: a process that is killed while it writes, and four clients that fill a quota."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.cache.files import contents, key_of, page_to_read, page_to_write, payload_of
from reference.cases import choose

from kt_runtime.cache.disk_tier import DiskTier, DiskTierSettings
from kt_runtime.cache.format import FILE_HEADER_BYTES, Namespace, slot_bytes_for
from kt_runtime.cache.index import segment_bytes_for
from kt_runtime.cache.page_store import SMALLEST_QUOTA, PageStore
from kt_runtime.errors import ConflictError

NAMESPACE = Namespace(weights="w", kv_dtype="bfloat16", page_tokens=64, layout="page_first_direct")

WRITER = """
import sys
from pathlib import Path
from kt_runtime.cache.page_store import PageStore
from reference.cache.files import page_to_write
store = PageStore(Path(sys.argv[1]), 2 << 20, b"n" * 16)
for start in range(0, 1_000_000, 5):
    store.write([page_to_write(number) for number in range(start, start + 5)])
    print(start + 5, flush=True)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_killed_writer_costs_at_most_what_was_in_flight(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    for _ in range(150):  # more than the quota holds: slots are used again
        process.stdout.readline()
    with pytest.raises(ConflictError, match=f"in use by process {process.pid}"):
        PageStore(tmp_path / "cache", 2 << 20, b"n" * 16)
    process.send_signal(signal.SIGKILL)
    said = [line for line in process.communicate()[0].splitlines() if line]
    last = int(said[-1]) if said else 750
    store = PageStore(tmp_path / "cache", 2 << 20, b"n" * 16)
    numbers = range(max(0, last - 300), last)
    pages = [page_to_read(number) for number in numbers]
    assert [number for number, hit in zip(numbers, store.read(pages), strict=True) if not hit] == []
    assert all(contents(page) == payload_of(number) for number, page in zip(numbers, pages, strict=True))
    store.close()


FORKED = """
import os, signal, sys
from pathlib import Path
from kt_runtime.cache.page_store import PageStore
from reference.cache.files import page_to_write

write_all = os.pwritev

def run(directory, last, part):
    left = last

    def write_and_die(descriptor, pieces, offset):
        nonlocal left
        left -= 1
        if left == 0:
            data = b"".join(pieces)
            os.pwrite(descriptor, data[: len(data) * part // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write_all(descriptor, pieces, offset)

    os.pwritev = write_and_die
    store = PageStore(directory, 1 << 20, b"n" * 16)
    for start in range(0, 100_000, 4):
        store.write([page_to_write(number, 24 << 10) for number in range(start, start + 4)])
        (directory / "done").write_text(str(start + 4))

for last in range(1, 61):
    directory = Path(sys.argv[1]) / str(last)
    child = os.fork()
    if child == 0:
        run(directory, last, last % 3)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


@pytest.mark.slow
def test_a_kill_at_any_write_of_a_real_process_loses_at_most_what_was_in_flight(tmp_path: Path) -> None:
    """Before it, in the middle of it, after it; from the first write to when slots have been used again."""
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], env=environment(), check=True, timeout=120)
    reached = []
    for last in range(1, 61):
        directory = tmp_path / str(last)
        done = int((directory / "done").read_text()) if (directory / "done").exists() else 0
        reached.append(done)
        store = PageStore(directory, 1 << 20, b"n" * 16)
        numbers = range(max(0, done - 30), done + 4)
        pages = [page_to_read(number, 24 << 10) for number in numbers]
        hits = store.read(pages)
        assert hits[: done - numbers.start] == [True] * (done - numbers.start)
        for number, page, hit in zip(numbers, pages, hits, strict=True):
            assert not hit or contents(page) == payload_of(number, 24 << 10)
        assert store.write([page_to_write(number, 24 << 10) for number in range(done, done + 8)]) == 8
        assert all(store.read([page_to_read(number, 24 << 10) for number in range(done, done + 8)]))
        store.close()
        assert bytes_in(directory) <= 1 << 20
    assert reached[0] == 0
    assert reached[-1] > 60  # the quota holds 41


def bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.slow
def test_the_quota_holds_while_four_clients_write(tmp_path: Path) -> None:
    quota, size = 8 << 20, 24 << 10
    tier = DiskTier(
        DiskTierSettings(
            directory=tmp_path / "cache",
            quota_bytes=quota,
            page_bytes=size,
            namespace=NAMESPACE,
            write_memory_bytes=1 << 20,
            patience_s=30.0,
        )
    )

    in_step = threading.Barrier(4)  # none falls so far behind that what it uses all the time is the oldest

    def client(number: int) -> int:
        largest, first = 0, number * 10_000
        for start in range(first, first + 200, 8):
            in_step.wait(30.0)
            assert all(tier.write([page_to_write(page, size) for page in range(start, start + 8)]))
            tier.look_up([key_of(page) for page in range(first, first + 8)])
            largest = max(largest, bytes_in(tmp_path / "cache"))
        return largest

    with ThreadPoolExecutor(4) as pool:
        largest = max(pool.map(client, range(4)))
    assert tier.flush(30.0)
    used = bytes_in(tmp_path / "cache")
    assert largest <= quota * 1.01
    assert quota * 0.98 <= used <= quota
    status = tier.status()
    assert status["dropped"] == 0
    assert status["records_written"] == 800
    tier.close()
    store = PageStore(tmp_path / "cache", quota, NAMESPACE.digest())
    for first in range(0, 40_000, 10_000):
        check_what_was_kept(store, first, size)
    store.close()


def check_what_was_kept(store: PageStore, first: int, size: int) -> None:
    """Of the pages of one client, in batches of 8: the first batch, which was used all the time, and the last ones; one
    batch may be half gone: its end."""
    pages = [page_to_read(page, size) for page in range(first, first + 200)]
    hits = store.read(pages)
    assert all(
        contents(page) == payload_of(number, size) for number, page in enumerate(pages, first) if hits[number - first]
    )
    assert all(hits[:8])
    counts = [sum(hits[start : start + 8]) for start in range(8, 200, 8)]
    assert counts == sorted(counts)
    assert len([count for count in counts if 0 < count < 8]) <= 1
    assert counts[-4:] == [8, 8, 8, 8]
    assert counts[0] == 0
    for start, count in zip(range(8, 200, 8), counts, strict=True):
        assert hits[start : start + 8] == [True] * count + [False] * (8 - count)


@pytest.mark.slow
def test_a_hundred_thousand_records_are_few_files_and_opened_quickly(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """How long it takes is recorded; what must not grow with the number of records is asserted."""
    count, quota = choose(few=20_000, usual=100_000, every=100_000), 4 << 30
    store = PageStore(tmp_path / "cache", quota, b"n" * 16)
    for start in range(0, count, 1000):
        store.write([page_to_write(number, 320) for number in range(start, start + 1000)])
    store.close()
    began = time.process_time()
    store = PageStore(tmp_path / "cache", quota, b"n" * 16)
    record_property("open_cpu_seconds", time.process_time() - began)
    assert len(store) == count
    assert present(store, [0, count * 7 // 9, count - 1])
    assert max(len(names) for _, _, names in os.walk(tmp_path)) < 100
    store.close()
    index_bytes = (tmp_path / "cache" / "index.log").stat().st_size
    assert index_bytes < 32 * count  # opening reads this, and nothing of the records


def present(store: PageStore, numbers: list[int]) -> bool:
    return all(store.read([page_to_read(number, 320) for number in numbers]))


@given(st.integers(SMALLEST_QUOTA, 1 << 60), st.integers(1, 1 << 30))
def test_no_quota_and_no_size_of_page_makes_many_files(quota: int, payload_bytes: int) -> None:
    slot = slot_bytes_for(payload_bytes)
    slots_in_one = max(1, (segment_bytes_for(quota) - FILE_HEADER_BYTES) // slot)
    assert quota // (FILE_HEADER_BYTES + slots_in_one * slot) < 10_000
