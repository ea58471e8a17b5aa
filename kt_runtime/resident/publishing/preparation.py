"""Stage 1 of a publication: from a file, or from tensors, to an adapter in the engine's format (`publisher.py`)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kt_runtime.adapters import (
    AdapterTensors,
    AdapterVersion,
    as_version,
    check_adapter,
    check_is_adapter,
    content_hash,
    read_adapter,
)
from kt_runtime.adapters.tensors import Contents, contents_of, give_way
from kt_runtime.beside import BATCHES
from kt_runtime.errors import AdapterError
from kt_runtime.families import Family
from kt_runtime.files import errors_of_path
from kt_runtime.resident.host import Host

logger = logging.getLogger(__name__)

SMALL_BYTES = 16 << 20
"""The engine's thread copies a smaller adapter into a slot, in a few milliseconds."""

MOST_AHEAD = 4
"""Loads, and publications of sessions, that are prepared before the engine's next turn: each holds a small adapter."""


@dataclass(frozen=True)
class Prepared:
    """Result of stage 1. `adapter`: complete and checked; nothing changes its tensors. `contents`: of these tensors.
    `servable`: in the engine's format.

    `version.lora_id` is None until installation.
    """

    adapter: AdapterTensors
    contents: Contents
    version: AdapterVersion
    servable: object


def _begin(num_bytes: int) -> None:
    """Called on a worker's thread. Work on a large adapter is background work; the engine waits for that on a small one
    (`beside.py`)."""
    give_way(num_bytes)
    if num_bytes < SMALL_BYTES:
        BATCHES.hurry()


class Preparation:
    """Stage 1 of one operation. `placed` and `close` are for the engine's thread, the rest for a worker.

    `slot`: reserved in the engine's memory (`Host.reserve_slot`), None if none is free.
    """

    def __init__(self, host: Host, family: Family, name: str, slot: object | None) -> None:
        self._host, self._family, self._name, self.slot = host, family, name, slot

    def loaded(self, path: str, source: str | None = None, expected: str | None = None) -> Prepared:
        """Reads a PEFT directory or GGUF file. `source`: what users are told, if it is not the path. `expected`: the
        content's hash; None: any.

        Raises as `read_adapter`, and as `checked`; AdapterError for another hash.
        """
        _begin(self._file_bytes(path))
        with errors_of_path(Path(path), "read"):
            host = self._host
            adapter = read_adapter(path, self._family, host.config, host.max_lora_rank, host.model)
        for note in adapter.notes:
            logger.info("adapter %r from %s: %s", self._name, path, note)
        prepared = self.checked(adapter, source or path)
        if expected not in (None, prepared.version.hash):
            raise AdapterError(f"{path}: its content has the hash {prepared.version.hash}, not {expected}")
        return prepared

    def loaded_if_small(self, path: str, source: str | None = None, expected: str | None = None) -> Prepared | int:
        """As `loaded`; only the size in bytes if a copy into a slot would take too long for the engine's thread."""
        num_bytes = self._file_bytes(path)
        return self.loaded(path, source, expected) if num_bytes < SMALL_BYTES else num_bytes

    def checked(self, adapter: AdapterTensors, source: str, known: Contents | None = None) -> Prepared:
        """`known`: contents of tensors that are measured already. Raises as `check_adapter` and the host."""
        _begin(adapter.num_bytes)
        host, where = self._host, f"adapter {self._name!r}"
        completed = as_version(adapter, self._family, host.config)
        contents = contents_of(completed, known)
        check_adapter(completed, self._family, host.config, host.max_lora_rank, where, contents)
        content = content_hash(completed, contents)
        version = AdapterVersion(content, time.time(), completed.rank, float(completed.alpha), source)
        return Prepared(completed, contents, version, self._servable(completed))

    def stored(self, adapter: AdapterTensors, version: AdapterVersion) -> Prepared:
        """For a version that was checked when it was published."""
        _begin(adapter.num_bytes)
        return Prepared(adapter, contents_of(adapter), replace(version, lora_id=None), self._servable(adapter))

    def placed(self, prepared: Prepared) -> Prepared:
        """Copies an adapter that was prepared without a slot, if it is small, into this preparation's slot."""
        if self.slot is None:
            return prepared
        return replace(prepared, servable=self._host.place_adapter(prepared.servable, self.slot))

    def close(self) -> None:
        """Frees the slot, unless `Host.install_adapter` has used it."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self._host.release_slot(slot)

    def _servable(self, adapter: AdapterTensors) -> object:
        return self._host.prepare_adapter(self._name, adapter, self.slot)

    @staticmethod
    def _file_bytes(path: str) -> int:
        """Bytes of the file, or of the directory's files. Raises NotFoundError."""
        place = Path(path)
        with errors_of_path(place, "read"):
            check_is_adapter(place)
            files = place.iterdir() if place.is_dir() else [place]
            return sum(each.stat().st_size for each in files if each.is_file())
