"""Damaged records, kept for inspection: a bounded number of them, never used again."""

from __future__ import annotations

import logging
from pathlib import Path

from kt_runtime.cache.filesystem import FileSystem, OpenFile

_MOST_FILES = 16

logger = logging.getLogger(__name__)


class Aside:
    """`limit_bytes` bounds the directory's content; beyond it, damaged records are only counted."""

    def __init__(self, files: FileSystem, directory: Path, limit_bytes: int) -> None:
        self._files, self._directory, self._limit = files, directory, limit_bytes
        self._bytes, self._count = 0, 0

    def open(self) -> None:
        self._files.make_directory(self._directory)
        for name in self._files.names(self._directory):
            file = self._files.open(self._directory / name)
            self._bytes += file.size()
            self._count += 1
            file.close()

    def keep(self, name: str, source: OpenFile, offset: int, size: int) -> None:
        """Copies `size` bytes from `source`, if there is room. Never raises: the record is lost either way."""
        if self._count >= _MOST_FILES or self._bytes + size > self._limit:
            return
        data = bytearray(size)
        try:
            count = source.read_into([data], offset)
            target = self._files.open(self._directory / name, write=True, create=True)
            try:
                target.truncate(0)
                target.write_from([memoryview(data)[:count]], 0)
            finally:
                target.close()
        except OSError as error:
            logger.debug("a damaged record could not be put aside: %s", error)
            return
        self._bytes += count
        self._count += 1

    def take_file(self, path: Path, size: int) -> None:
        """Moves a file that is no valid segment here, or deletes it if there is no room."""
        if self._count < _MOST_FILES and self._bytes + size <= self._limit:
            self._files.rename(path, self._directory / path.name)
            self._bytes += size
            self._count += 1
        else:
            self._files.remove(path)
