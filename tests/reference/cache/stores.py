"""A page store in a directory in memory, and pages whose contents follow from their numbers."""

from __future__ import annotations

from pathlib import Path

from reference.cache.files import FaultyFiles, contents, page_to_read, page_to_write, payload_of

from kt_runtime.cache.page_store import PageStore

ROOT = Path("/cache")
NAMESPACE = b"n" * 16
QUOTA = 1 << 20
SIZE = 4096


def open_store(files: FaultyFiles, **options: object) -> PageStore:
    return PageStore(ROOT, QUOTA, NAMESPACE, files=files, **options)  # type: ignore[arg-type]


def write(store: PageStore, numbers: range | list[int], size: int = SIZE) -> int:
    return store.write([page_to_write(number, size) for number in numbers])


def present(store: PageStore, numbers: range | list[int], size: int = SIZE) -> list[int]:
    """Those that can be read; what is read must be right."""
    pages = [page_to_read(number, size) for number in numbers]
    found = []
    for number, page, hit in zip(numbers, pages, store.read(pages), strict=True):
        if hit:
            assert contents(page) == payload_of(number, size)
            found.append(number)
    return found


def segment_of(files: FaultyFiles) -> bytearray:
    return files.files[ROOT / "segments" / "00000001.seg"].data
