"""Publishing to a registry and reading from it. No threads, no names of this server: `serve/registry` has those."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kt_runtime.errors import AdapterError, ConflictError, InvalidValueError
from kt_runtime.files import TEMPORARY_PREFIX
from kt_runtime.registry.place import DirectoryPlace, Place
from kt_runtime.registry.records import MAX_BYTES, Base, File, Heartbeat, Manifest, decoded, encoded

BASE, NAMES, DATA, REPLICAS = "base.json", "names", "data", "replicas"
KEPT_REVISIONS = 8
"""Revisions of a name that are kept. The replica that publishes a newer one removes older ones."""
UPLOADS = 4
"""Files of a version that are written at once."""
_DIGITS = 8
_SUFFIX = ".json"


class Registry:
    """`replica`: this server's name in the registry. `kept`: revisions of a name that stay.

    Methods raise OSError as the place does. Thread-safe, except that `join` and `clear_unfinished` must be called
    before the other methods.
    """

    def __init__(
        self, place: Place, replica: str, kept: int = KEPT_REVISIONS, clock: Callable[[], float] = time.time
    ) -> None:
        if kept < 2:
            raise InvalidValueError(f"kept revisions: {kept}; expected at least 2")
        self.place, self.replica, self._kept, self._clock = place, replica, kept, clock
        self._uncommitted: dict[str, set[str]] = {}
        self._joined: str | None = None

    # The weights that it is for.

    def base(self) -> Base | None:
        """None before the first replica has joined. Raises InvalidValueError for a record that is not whole."""
        try:
            data = self.place.read(BASE, MAX_BYTES)
        except FileNotFoundError:
            return None
        return decoded(data, Base, BASE)

    def join(self, fingerprint: str, model: str, shape: dict[str, int | str]) -> Base:
        """The registry's base; the first replica writes it. Raises ConflictError for other weights, with both hashes.

        `fingerprint`: of this server's weights.
        """
        ours = Base(registry=secrets.token_hex(16), fingerprint=fingerprint, model=model, shape=shape)
        found = self.base()
        if found is None:
            found = ours if self.place.create(BASE, encoded(ours)) else self.base()
        if found is None:
            raise InvalidValueError(f"{BASE}: was removed while this server joined")
        if found.fingerprint != fingerprint:
            raise ConflictError(
                f"the registry is for other weights: fingerprint {found.fingerprint} ({found.model}), and this server "
                f"has {fingerprint} ({model}); nothing is taken from it or written to it"
            )
        self._joined = found.registry
        return found

    def clear_unfinished(self) -> None:
        """Removes what this replica wrote and did not commit before it ended. Never call it during its own
        publications."""
        if isinstance(self.place, DirectoryPlace):
            self.place.clear_unfinished()
        own = {self._version_place(key) for key in self.place.keys(f"{DATA}/{self.replica}")}
        if not own:
            return
        committed = set()
        for name, revisions in self.revisions().items():
            for revision in revisions:
                try:
                    committed.add(self.manifest(name, revision).data)
                except InvalidValueError:
                    return  # it may name any of them
        for data in sorted(own - committed):
            self.place.remove(f"{DATA}/{data}")

    # Names.

    def revisions(self) -> dict[str, list[int]]:
        """The revisions of each name that are there, ascending."""
        found: dict[str, list[int]] = {}
        for key in self.place.keys(NAMES):
            name, _, file = key.removeprefix(f"{NAMES}/").rpartition("/")
            digits = file.removesuffix(_SUFFIX)
            if "/" not in name and digits.isdecimal() and key == _key(name, int(digits)):
                found.setdefault(name, []).append(int(digits))
        return {name: sorted(revisions) for name, revisions in found.items()}

    def manifest(self, name: str, revision: int) -> Manifest:
        """Raises InvalidValueError for one that is not whole, or not of this name and revision."""
        key = _key(name, revision)
        found = decoded(self.place.read(key, MAX_BYTES), Manifest, key)
        if (found.name, found.revision) != (name, revision):
            raise InvalidValueError(f"{key}: is of revision {found.revision} of {found.name!r}")
        return found

    def publish(
        self, name: str, version: str, directory: Path, *, base: str, source: str = "", after: int = 0
    ) -> Manifest:
        """Writes the version's files, then the manifest under the next free revision, which is above `after`.

        `version`: the content hash. `base`: the fingerprint of the weights. A crash before the manifest changes nothing
        for other replicas. After an error the manifest may be there or not: to publish again is always right.
        """
        data = f"{self.replica}/{version[:16]}-{secrets.token_hex(8)}"
        try:
            files = self._uploaded(data, sorted(path for path in directory.iterdir() if path.is_file()))
            if not files:
                raise FileNotFoundError(f"{directory}: has no files")
            self.place.sync(f"{DATA}/{data}")
        except BaseException:
            self._forget(data)
            raise
        self._uncommitted.setdefault(name, set()).add(data)
        manifest = self._commit(
            Manifest(
                name=name,
                revision=1,
                version=version,
                base=base,
                replica=self.replica,
                source=source,
                data=data,
                files=files,
            ),
            after,
        )
        self._forget_uncommitted(name)
        return manifest

    def _uploaded(self, data: str, paths: list[Path]) -> list[File]:
        """Uploads the files concurrently: syncing a small file takes about as long as syncing a large one. When an
        error is raised, no upload is running any more."""

        def upload(path: Path) -> File:
            size, digest = self.place.upload(f"{DATA}/{data}/{path.name}", path)
            return File(name=path.name, size=size, sha256=digest)

        with ThreadPoolExecutor(UPLOADS) as threads:
            return list(threads.map(upload, paths))

    def unload(self, name: str, *, base: str, after: int = 0) -> Manifest:
        """A revision that says that `name` is not served any more."""
        return self._commit(Manifest(name=name, revision=1, version=None, base=base, replica=self.replica), after)

    def pull(self, manifest: Manifest, root: Path) -> Path:
        """Downloads the version's files into a new directory below `root`, and checks each one's size and SHA-256.

        Raises AdapterError for a file that is not the manifest's; no file remains then.
        """
        target = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=root))
        try:
            for file in manifest.files:
                key = f"{DATA}/{manifest.data}/{file.name}"
                size, digest = self.place.download(key, target / file.name)
                if (size, digest) != (file.size, file.sha256):
                    raise AdapterError(
                        f"{key}: has {size} bytes with SHA-256 {digest}; its manifest says {file.size} bytes, "
                        f"{file.sha256}"
                    )
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target

    def _commit(self, wanted: Manifest, after: int) -> Manifest:
        while True:
            there = self.revisions().get(wanted.name, [])
            newest = max([after, *there])
            manifest = msgspec.structs.replace(wanted, revision=newest + 1, published_at=self._clock())
            if not self.place.create(_key(wanted.name, manifest.revision), encoded(manifest)):
                continue  # another replica was first
            self._check_joined()
            there = self.revisions().get(wanted.name, [])
            if there and there[-1] - manifest.revision >= self._kept:
                # Many others were published, and older ones removed, between the look and the creation: this number
                # had been taken before. A replica that has seen the newer ones would ignore it.
                self.place.remove(_key(wanted.name, manifest.revision))
                continue
            self._remove_old(wanted.name, there, manifest.revision)
            return manifest

    def _check_joined(self) -> None:
        """Raises ConflictError if the registry was replaced: with its mount lost, the manifest may lie below the mount
        point."""
        if self._joined is None:
            return
        base = self.base()
        if base is None or base.registry != self._joined:
            raise ConflictError(f"the registry {self._joined[:8]} was replaced while this was published")

    def _remove_old(self, name: str, revisions: list[int], newest: int) -> None:
        """Removes old revisions. A failure leaves old files, which do no harm."""
        try:
            for revision in [each for each in revisions if each <= newest - self._kept]:
                try:
                    data = self.manifest(name, revision).data
                except InvalidValueError:
                    data = None
                self.place.remove(_key(name, revision))
                if data is not None:
                    self.place.remove(f"{DATA}/{data}")
        except OSError:
            return

    def _forget(self, data: str) -> None:
        try:
            self.place.remove(f"{DATA}/{data}")
        except OSError:
            return  # `clear_unfinished` removes it after the next start

    def _forget_uncommitted(self, name: str) -> None:
        """Removes files of failed publications of `name`. A manifest may have been written although its writer got an
        error, so only what no manifest names is removed."""
        try:
            committed = {self.manifest(name, revision).data for revision in self.revisions().get(name, [])}
        except (OSError, InvalidValueError):
            return
        for data in self._uncommitted.pop(name, set()) - committed:
            self._forget(data)

    def _version_place(self, key: str) -> str:
        return "/".join(key.removeprefix(f"{DATA}/").split("/")[:2])

    # Replicas.

    def beat(self, heartbeat: Heartbeat) -> None:
        self.place.put(f"{REPLICAS}/{self.replica}{_SUFFIX}", encoded(heartbeat))

    def leave(self, replica: str) -> None:
        self.place.remove(f"{REPLICAS}/{replica}{_SUFFIX}")

    def replicas(self) -> dict[str, Heartbeat]:
        """The last word of each replica. One that can't be read, or that has just left, is skipped."""
        found = {}
        for key in self.place.keys(REPLICAS):
            try:
                heartbeat = decoded(self.place.read(key, MAX_BYTES), Heartbeat, key)
            except (InvalidValueError, FileNotFoundError):
                continue
            if key == f"{REPLICAS}/{heartbeat.replica}{_SUFFIX}":
                found[heartbeat.replica] = heartbeat
        return found


def _key(name: str, revision: int) -> str:
    return f"{NAMES}/{name}/{revision:0{_DIGITS}}{_SUFFIX}"
