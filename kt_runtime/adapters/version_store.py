"""Published versions on disk, for rollback and restarts.

    ROOT/NAME/HASH/adapter_config.json, adapter_model.safetensors, version.json     one PEFT directory per version
    ROOT/NAME/current.json      {"format": 1, "served": [HASH, ...]}                served versions, current one last

Directories and `current.json` are renamed into place: a crash leaves the old state or the new one, and temporary names,
which listings skip. `current.json` is written after the version that it names. Only one process writes a store at a
time; it holds a lock (`serve/adapter_directory.py`). Only the owner may read the files. A root that existed when the
store was opened is never created again: if its disk is lost, no directory may replace it at the mount point.

Methods for one name raise OSError as the system calls do; `clean` and `scan` report it in their results.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.adapters.paths import NAME_PATTERN, check_adapter_name, open_directory
from kt_runtime.adapters.peft_directory import read_peft_directory, write_peft_directory
from kt_runtime.adapters.tensors import AdapterTensors
from kt_runtime.adapters.versions import AdapterVersion, as_version, content_hash, has_hash
from kt_runtime.errors import AdapterError, ConflictError, KtError, UnknownNameError
from kt_runtime.families import Family
from kt_runtime.files import fsync_directory, remove_unfinished, visible_entries, write_json

CURRENT_FILE = "current.json"
VERSION_FILE = "version.json"
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredName:
    """A name in use: `versions` are all complete ones, the oldest first; `served` is as in VersionTable."""

    name: str
    versions: list[AdapterVersion]
    served: list[str]


class VersionStore:
    """Versions of one model's adapters below `root`, which is created when needed. At most `kept` versions per name."""

    def __init__(self, root: Path, family: Family, config: Mapping[str, Any], max_rank: int, kept: int = 8) -> None:
        self.root = root
        self._family, self._config, self._max_rank, self._kept = family, config, max_rank, kept
        self._was_there = root.is_dir()

    def save(
        self,
        name: str,
        adapter: AdapterTensors,
        *,
        created: float,
        source: str = "",
        base_model: str | None = None,
        version_hash: str | None = None,
    ) -> AdapterVersion:
        """Writes a version, unless it is stored already, and returns it. Does not change the current version of `name`.

        Tensors are stored exactly: in float32 if their dtypes differ, otherwise as they are. `version_hash`: the
        content hash, if the caller knows it. Raises as `check_adapter`.
        """
        check_adapter_name(name)
        stored = as_version(adapter, self._family, self._config)
        identity = version_hash or content_hash(stored)
        version = AdapterVersion(identity, created, stored.rank, float(stored.alpha), source)
        path = self.root / name / version.hash
        self._check_is_there()
        if path.is_dir():
            return self._describe(path)
        described = {
            "hash": version.hash,
            "created": created,
            "rank": version.rank,
            "alpha": version.alpha,
            "source": source,
        }
        for directory in (self.root, path.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_peft_directory(
                path,
                stored,
                self._family,
                self._config,
                max_rank=self._max_rank,
                base_model=base_model,
                dtype=next(iter(stored.modules.values())).a.dtype,
                extra={VERSION_FILE: json.dumps(described).encode()},
                private=True,
            )
        except ConflictError:  # another rank's process has stored the same content meanwhile
            if not path.is_dir():
                raise
        return version

    def load(self, name: str, version_hash: str) -> AdapterTensors:
        """Reads and validates a version. Raises UnknownNameError, and AdapterError if its content has another hash."""
        check_adapter_name(name)
        path = self.root / name / version_hash
        if not _HASH.fullmatch(version_hash) or not path.is_dir():
            raise UnknownNameError("version", version_hash, self._hashes(name), f"adapter {name!r}")
        adapter = read_peft_directory(path, self._family, self._config, self._max_rank)
        if not has_hash(adapter, version_hash):
            found = content_hash(adapter)
            raise AdapterError(f"{path}: its content has the hash {found}; it was changed after it was published")
        return adapter

    def names(self) -> list[str]:
        """Names with a current version, sorted."""
        entries = visible_entries(self.root)
        return [path.name for path in entries if NAME_PATTERN.fullmatch(path.name) and (path / CURRENT_FILE).is_file()]

    def versions(self, name: str) -> list[AdapterVersion]:
        """Every complete version of `name`, the oldest first; skips versions whose description is unreadable."""
        found = []
        for version_hash in self._hashes(name):
            try:
                found.append(self._describe(self.root / name / version_hash))
            except AdapterError:
                continue
        return sorted(found, key=lambda version: (version.created, version.hash))

    def point(self, name: str, served: list[str], known: Collection[str] = ()) -> None:
        """Durably makes `served[-1]` the current version of `name`, and removes versions beyond `kept`.

        `served`, `known`: as in VersionTable; versions outside `known` are removed first. Raises UnknownNameError if
        the version is not stored.
        """
        check_adapter_name(name)
        hashes = self._hashes(name)
        if not served or served[-1] not in hashes:
            raise UnknownNameError("version", served[-1] if served else "", hashes, f"adapter {name!r}")
        write_json(
            self.root / name / CURRENT_FILE,
            {"format": 1, "served": [item for item in served if item in hashes]},
            private=True,
        )
        self._remove_oldest(name, served[-1], known)

    def served(self, name: str) -> list[str]:
        """Hashes that `name` served, in order, the current one last. Raises UnknownNameError, AdapterError."""
        check_adapter_name(name)
        path = self.root / name
        if not (path / CURRENT_FILE).is_file():
            raise UnknownNameError("adapter", name, self.names())
        hashes = set(self._hashes(name))
        value = _read_json(path, CURRENT_FILE)
        served = value.get("served")
        is_list = isinstance(served, list) and all(isinstance(item, str) for item in served)
        if value.get("format") != 1 or not is_list or not served:
            raise AdapterError(f'{path / CURRENT_FILE}: expected {{"format": 1, "served": [hash, ...]}}')
        if served[-1] not in hashes:
            raise AdapterError(f"{path / CURRENT_FILE}: names version {str(served[-1])[:64]!r}, which is not stored")
        return [item for item in served if item in hashes]

    def forget(self, name: str) -> None:
        """Unloads `name`, for later restarts too; its versions stay on disk. Ignores an unknown name."""
        check_adapter_name(name)
        self._check_is_there()
        self._unlink_current(name)

    def _check_is_there(self) -> None:
        if self._was_there and not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory is gone", str(self.root))

    def _unlink_current(self, name: str) -> None:
        """Removes `current.json` durably: a power cut must not restore an unloaded name."""
        path = self.root / name / CURRENT_FILE
        try:
            path.unlink()
        except FileNotFoundError:
            return
        fsync_directory(path.parent)

    def remove(self, name: str) -> None:
        """Unloads `name` and removes its versions. Ignores an unknown name."""
        check_adapter_name(name)
        self._unlink_current(name)
        shutil.rmtree(self.root / name, ignore_errors=True)

    def clean(self) -> list[str]:
        """Removes what a crash left half written; returns a message for each entry that could not be removed.

        Call it before the first write, never while another thread writes.
        """
        return remove_unfinished(self.root)

    def scan(self) -> tuple[list[StoredName], list[str]]:
        """All names in use, sorted, and a message for each name that can't be read."""
        found: list[StoredName] = []
        problems: list[str] = []
        try:
            entries = visible_entries(self.root)
        except OSError as error:
            return [], [f"{self.root}: can't be read: {error.strerror}"]
        for path in entries:
            try:
                if NAME_PATTERN.fullmatch(path.name) and (path / CURRENT_FILE).is_file():
                    found.append(StoredName(path.name, self.versions(path.name), self.served(path.name)))
            except OSError as error:
                problems.append(f"{path}: can't be read, so this adapter is not served: {error.strerror or error}")
            except KtError as error:
                problems.append(f"adapter {path.name!r} is not served: {error}")
        return found, problems

    def _hashes(self, name: str) -> list[str]:
        entries = visible_entries(self.root / name)
        return [path.name for path in entries if _HASH.fullmatch(path.name) and path.is_dir()]

    def _describe(self, path: Path) -> AdapterVersion:
        value = _read_json(path, VERSION_FILE)
        try:
            version = AdapterVersion(
                hash=path.name,
                created=float(value["created"]),
                rank=int(value["rank"]),
                alpha=float(value["alpha"]),
                source=str(value["source"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise AdapterError(f"{path / VERSION_FILE}: not a version's description: {error!r}") from None
        if not math.isfinite(version.created) or not math.isfinite(version.alpha):
            raise AdapterError(f"{path / VERSION_FILE}: not a version's description: NaN or Inf in it")
        return version

    def _remove_oldest(self, name: str, current: str, known: Collection[str]) -> None:
        """Content that was published again keeps its old creation time on disk, so `known` protects it from removal."""
        hashes = sorted((version.hash for version in self.versions(name)), key=lambda item: item in known)
        for version_hash in [item for item in hashes if item != current][: max(0, len(hashes) - self._kept)]:
            shutil.rmtree(self.root / name / version_hash, ignore_errors=True)


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    with open_directory(directory) as opened:
        data = opened.read(name, _MAX_JSON_BYTES)
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{directory / name}: invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{directory / name}: expected a JSON object")
    return value
