"""Backs `kt-runtime cache stat|verify|clear`. The cache directory is open for the time of a call.

Of a directory of several ranks a call looks at each rank's part, and adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kt_runtime.cache.directory import parts_of_ranks
from kt_runtime.cache.disk import DiskFiles, FileSystem
from kt_runtime.cache.index import DROP, PUT, IndexLog
from kt_runtime.cache.page_store import PageStore
from kt_runtime.errors import NotFoundError

FOREIGN = "a file that is no segment of this format"
LOST = "gone: its segment was cut off, damaged or removed"
UNREADABLE = "the system refused to read it"

_ANY = bytes(16)  # no record is looked up by key here, so any namespace works
_QUOTA = 1 << 62  # inspection evicts nothing
_MOST_TRIES = 10


@dataclass(frozen=True)
class Statistics:
    """`disk_bytes`: segments and index. `slot_bytes`: bytes of a record on disk -> number of records.

    `quarantined`: names of the damaged records that are kept, `quarantined_bytes` in all. `holder`: the process that
    writes there.
    """

    records: int
    disk_bytes: int
    slot_bytes: dict[int, int]
    quarantined: tuple[str, ...]
    quarantined_bytes: int
    holder: str | None


@dataclass(frozen=True)
class Damage:
    """`record`: its id, or the file's name. `kept_as`: the quarantined file; None if the quarantine was full, or if the
    record was unreadable and stayed where it is."""

    record: str
    fault: str
    kept_as: str | None


@dataclass(frozen=True)
class Verification:
    """`records`: number of records read. `index_was_right`: False if the index was damaged and has been rewritten."""

    records: int
    damaged: tuple[Damage, ...]
    index_was_right: bool

    @property
    def faults(self) -> dict[str, int]:
        """Kind of damage -> number of records."""
        return dict(Counter(damage.fault for damage in self.damaged))


def statistics(path: Path, files: FileSystem | None = None) -> Statistics:
    """Works while a server is using the directory. Raises NotFoundError if there is no cache."""
    files = files or DiskFiles()
    if of_ranks := _parts(path, files):
        return _added_up([(part.name, statistics(part, files)) for part in of_ranks])
    store = _open_to_look(path, files)
    try:
        quarantined = _quarantined(path, files)
        return Statistics(
            len(store),
            store.used_bytes,
            store.slot_sizes(),
            tuple(sorted(quarantined)),
            sum(quarantined.values()),
            files.lock_holder(path / "lock"),
        )
    finally:
        store.abandon()


def verify(
    path: Path, files: FileSystem | None = None, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Reads every record, in LRU order, and quarantines damaged ones. Raises NotFoundError if there is no cache and
    ConflictError while a server is using it: records that it is writing would look damaged.

    `progress(done_bytes, total_bytes)` is called after each record; with several ranks, of each rank's part.
    """
    files = files or DiskFiles()
    check_is_cache(path, files)
    if of_ranks := _parts(path, files):
        verified = [verify(part, files, progress) for part in of_ranks]
        return Verification(
            sum(each.records for each in verified),
            tuple(damage for each in verified for damage in each.damaged),
            all(each.index_was_right for each in verified),
        )
    indexed, is_right = _indexed(path, files)
    before = _quarantined(path, files)
    store = PageStore(path, _QUOTA, _ANY, files=files)
    try:
        foreign = sorted(_quarantined(path, files).keys() - before.keys())
        found = [(name, FOREIGN) for name in foreign]
        found += [("", FOREIGN)] * (store.counters["corrupt"] - len(foreign))  # the quarantine had no room for them
        records = store.records()
        lost = indexed - set(records)
        if lost:
            store.rewrite_index()  # so that the next call does not report them again
        found += [(record.hex(), LOST) for record in sorted(lost)]
        found += _check_all(store, records, progress)
        kept = _quarantined(path, files)
        damaged = tuple(Damage(name, fault, _kept_as(name, fault, path, kept)) for name, fault in found)
        return Verification(len(records), damaged, is_right)
    finally:
        store.close()


def clear(path: Path, files: FileSystem | None = None) -> int:
    """Removes all records; returns their number. The quarantine stays. Raises as `verify` does."""
    files = files or DiskFiles()
    check_is_cache(path, files)
    if of_ranks := _parts(path, files):
        return sum(clear(part, files) for part in of_ranks)
    store = PageStore(path, _QUOTA, _ANY, files=files)
    try:
        return store.clear()
    finally:
        store.close()


def check_is_cache(path: Path, files: FileSystem | None = None) -> None:
    """Raises NotFoundError if there is no cache at `path`, so that no other directory is turned into one."""
    try:
        names = (files or DiskFiles()).names(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist, or is no directory") from None
    if "segments" not in names and not _parts(path, files or DiskFiles()):
        raise NotFoundError(f"{path} is no cache directory: it has no 'segments'")


def _parts(path: Path, files: FileSystem) -> list[Path]:
    """The parts of ranks in `path`; none if it is no directory."""
    try:
        return parts_of_ranks(path, files)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _added_up(found: list[tuple[str, Statistics]]) -> Statistics:
    """The sum of the parts' statistics. `found`: with each part's name."""
    slot_bytes: Counter[int] = Counter()
    for _, each in found:
        slot_bytes.update(each.slot_bytes)
    return Statistics(
        sum(each.records for _, each in found),
        sum(each.disk_bytes for _, each in found),
        dict(slot_bytes),
        tuple(f"{name}/{record}" for name, each in found for record in each.quarantined),
        sum(each.quarantined_bytes for _, each in found),
        ", ".join(dict.fromkeys(each.holder for _, each in found if each.holder)) or None,
    )


def _open_to_look(path: Path, files: FileSystem) -> PageStore:
    """Opens again if a server removes a segment between listing and opening it."""
    for _ in range(_MOST_TRIES):
        try:
            return PageStore(path, _QUOTA, _ANY, files=files, read_only=True)
        except NotFoundError:
            raise
        except FileNotFoundError as error:
            last = error
    raise last


def _check_all(
    store: PageStore, records: list[bytes], progress: Callable[[int, int], None] | None
) -> list[tuple[str, str]]:
    """(record, what is wrong with it) of each damaged record."""
    found = []
    total_bytes = sum(size * count for size, count in store.slot_sizes().items())
    for number, record in enumerate(records, start=1):
        try:
            fault = store.check_record(record)
        except OSError as error:
            found.append((record.hex(), f"{UNREADABLE} ({error.strerror})"))
        else:
            found += [] if fault is None else [(record.hex(), fault.value)]
        if progress is not None:
            progress(total_bytes * number // len(records), total_bytes)
    return found


def _indexed(path: Path, files: FileSystem) -> tuple[set[bytes], bool]:
    """The records that the index lists, and whether the index is whole. A damaged index lists none."""
    if "index.log" not in files.names(path):
        return set(), True
    log = IndexLog(files, path / "index.log", write=False)
    try:
        places: dict[bytes, tuple[int, int]] = {}
        owners: dict[tuple[int, int], bytes] = {}
        for kind, number, slot, record in log.replay():
            if kind == PUT:
                places.pop(owners.pop((number, slot), b""), None)
                places[record], owners[number, slot] = (number, slot), record
            elif kind == DROP:
                owners.pop(places.pop(record, (0, 0)), None)
        return (set(), False) if log.is_damaged else (set(places), True)
    finally:
        log.close()


def _quarantined(path: Path, files: FileSystem) -> dict[str, int]:
    """Contents of the quarantine: name -> bytes."""
    if "quarantine" not in files.names(path):
        return {}
    sizes = {}
    for name in files.names(path / "quarantine"):
        file = files.open(path / "quarantine" / name)
        sizes[name] = file.size()
        file.close()
    return sizes


def _kept_as(name: str, fault: str, path: Path, kept: dict[str, int]) -> str | None:
    file = name if fault == FOREIGN else f"{name}.bad"
    return str(path / "quarantine" / file) if file in kept else None
