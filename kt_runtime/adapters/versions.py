"""The versions of each adapter name in memory: the current one and those before it.

A version is immutable and identified by its content hash. A name has a list of the versions that it served, the current
one last: publishing appends, a rollback cuts the list. Versions cut off stay known, so that a rollback by hash can
restore them, until more than `kept` of a name are known. The engine, not this module, counts requests in flight.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field, replace

import torch

from kt_runtime.adapters.paths import check_adapter_name
from kt_runtime.adapters.tensors import AdapterTensors, Contents, complete_groups, contents_of
from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.families import Family
from kt_runtime.families.base import Config

SHOWN_HASH_CHARACTERS = 16
_SHORTEST_PREFIX = 4


@dataclass(frozen=True)
class AdapterVersion:
    """`hash`: 64 hexadecimal digits. `created`: seconds since 1970. `source`: where it came from, for users.

    `lora_id`: the engine's id of the loaded version, None while it is not loaded.
    """

    hash: str
    created: float
    rank: int
    alpha: float
    source: str = ""
    lora_id: str | None = None

    @property
    def shown_hash(self) -> str:
        return self.hash[:SHOWN_HASH_CHARACTERS]


def as_version(adapter: AdapterTensors, family: Family, config: Config) -> AdapterTensors:
    """The form of `adapter` that versions store and hash: complete groups, one dtype.

    A published adapter, its version's directory and any other directory with the same content then have the same hash.
    """
    return complete_groups(adapter, family, config).in_one_dtype()


def content_hash(adapter: AdapterTensors, contents: Contents | None = None) -> str:
    """SHA-256 over rank, alpha, and of each tensor in the order of the names: name, dtype, shape, SHA-256 of its bytes.

    Two adapters with the same hash give the same results. The same numbers in another dtype are another version.
    `contents`: those of tensors that were measured before; the others are measured here, on several threads.
    """
    found = contents_of(adapter, contents)
    digest = hashlib.sha256(f"kt-runtime adapter 2\n{adapter.rank}\n{float(adapter.alpha)!r}\n".encode())
    for name, pair in sorted(adapter.modules.items()):
        for letter, tensor in zip("AB", pair, strict=True):
            key = f"{name}.lora_{letter}"
            digest.update(f"{key}\n{tensor.dtype}\n{list(tensor.shape)}\n".encode() + found[key].digest)
    return digest.hexdigest()


def has_hash(adapter: AdapterTensors, expected: str) -> bool:
    """Whether `expected` is the adapter's content hash, in its present or its first form."""
    return content_hash(adapter) == expected or _first_content_hash(adapter) == expected


def _first_content_hash(adapter: AdapterTensors) -> str:
    """The first form, which directories on disk may be named after: one SHA-256 over all bytes, a tensor per expert."""
    digest = hashlib.sha256(f"kt-runtime adapter 1\n{adapter.rank}\n{float(adapter.alpha)!r}\n".encode())
    for name, tensor in sorted(adapter.tensors.items()):
        stored = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}\n{stored.dtype}\n{list(stored.shape)}\n".encode())
        digest.update(stored.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass
class _Entry:
    """`served`: hashes of the served versions in order, the current one last, each once."""

    versions: dict[str, AdapterVersion] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)


class VersionTable:
    """Names, their current versions and `kept` versions of history each. Thread-safe."""

    def __init__(self, kept: int = 8) -> None:
        if kept < 1:
            raise InvalidValueError(f"kept versions: {kept}; expected at least 1")
        self._kept = kept
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def publish(self, name: str, version: AdapterVersion) -> AdapterVersion | None:
        """Makes `version` current for `name`; returns the former one. Raises InvalidValueError for a bad name."""
        check_adapter_name(name)
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            before = _current(entry)
            entry.versions.pop(version.hash, None)
            entry.versions[version.hash] = version
            entry.served = [item for item in entry.served if item != version.hash] + [version.hash]
            self._forget_oldest(entry)
            return before

    def rollback_target(self, name: str, to: str | None = None) -> AdapterVersion:
        """The version that `rollback` would restore: the one before the current, or the one with hash prefix `to`.

        Raises UnknownNameError for an unknown name or hash; ConflictError if there is no earlier version, or if `to`
        fits several or is the current one.
        """
        with self._lock:
            return self._target(name, to)

    def rollback(self, name: str, to: str | None = None, lora_id: str | None = None) -> AdapterVersion:
        """Makes an earlier version (with `to`, any known one) current, loaded as `lora_id`; returns it."""
        with self._lock:
            target = replace(self._target(name, to), lora_id=lora_id)
            entry = self._entries[name]
            entry.versions[target.hash] = target
            if target.hash in entry.served:
                entry.served = entry.served[: entry.served.index(target.hash) + 1]
            else:
                entry.served.append(target.hash)
            return target

    def loaded(self, name: str, lora_id: str) -> None:
        """Records that the current version is loaded as `lora_id`; keeps the history. Raises UnknownNameError."""
        with self._lock:
            entry = self._entry(name)
            entry.versions[entry.served[-1]] = replace(entry.versions[entry.served[-1]], lora_id=lora_id)

    def unload(self, name: str) -> AdapterVersion:
        """Forgets `name` and its history; returns its current version. Raises UnknownNameError."""
        with self._lock:
            current = _current(self._entry(name))
            del self._entries[name]
            assert current is not None
            return current

    def current(self, name: str) -> AdapterVersion:
        """Raises UnknownNameError for a name without a version."""
        with self._lock:
            entry = self._entry(name)
            return entry.versions[entry.served[-1]]

    def history(self, name: str) -> list[AdapterVersion]:
        """Every known version of `name`, in the order of publication. Raises UnknownNameError."""
        with self._lock:
            return list(self._entry(name).versions.values())

    def served(self, name: str) -> list[str]:
        """Hashes of the versions that `rollback` steps back through, the current one last. Raises UnknownNameError."""
        with self._lock:
            return list(self._entry(name).served)

    def current_versions(self) -> dict[str, AdapterVersion]:
        """Every name with its current version, sorted by name."""
        with self._lock:
            return {name: entry.versions[entry.served[-1]] for name, entry in sorted(self._entries.items())}

    def restore(self, name: str, versions: list[AdapterVersion], served: list[str]) -> None:
        """Restores the results of `history` and `served` after a restart. Hashes without a version are left out."""
        check_adapter_name(name)
        known = {version.hash: version for version in versions}
        kept = [item for item in served if item in known]
        if not kept:
            raise UnknownNameError("version", served[-1] if served else "", known, f"adapter {name!r}")
        with self._lock:
            self._entries[name] = _Entry(known, kept)
            self._forget_oldest(self._entries[name])

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UnknownNameError("adapter", name, self._entries)
        return self._entries[name]

    def _target(self, name: str, to: str | None) -> AdapterVersion:
        entry = self._entry(name)
        if to is None:
            if len(entry.served) < 2:
                raise ConflictError(f"adapter {name!r}: no version is known from before {entry.served[-1][:16]}")
            return entry.versions[entry.served[-2]]
        shown = [item[:SHOWN_HASH_CHARACTERS] for item in entry.versions]
        if len(to) < _SHORTEST_PREFIX:
            raise InvalidValueError(
                f"adapter {name!r}: version {to!r}: versions have no numbers; give the first {_SHORTEST_PREFIX} or "
                f"more digits of a hash. Its versions, oldest first: {', '.join(shown)}; "
                f"{entry.served[-1][:SHOWN_HASH_CHARACTERS]} is served now"
            )
        found = [item for item in entry.versions if item.startswith(to)]
        if not found:
            raise UnknownNameError("version", to, shown, f"adapter {name!r}")
        if len(found) > 1:
            raise ConflictError(f"adapter {name!r}: {to!r} is the beginning of {len(found)} versions; give more digits")
        if found[0] == entry.served[-1]:
            raise ConflictError(f"adapter {name!r}: {found[0][:16]} is the current version already")
        return entry.versions[found[0]]

    def _forget_oldest(self, entry: _Entry) -> None:
        for item in list(entry.versions):
            if len(entry.versions) <= self._kept:
                return
            if item != entry.served[-1]:
                del entry.versions[item]
                entry.served = [other for other in entry.served if other != item]


def _current(entry: _Entry) -> AdapterVersion | None:
    return entry.versions[entry.served[-1]] if entry.served else None
