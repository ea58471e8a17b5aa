"""Where a registry's files are: a shared directory, or an object store through fsspec.

Keys are relative paths with "/". A file appears whole or not at all: in a directory under a temporary name, synced and
renamed; in an object store by the store itself. All methods raise OSError, also for what a store's client raises.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.files import fsync_directory

UNFINISHED = "unfinished"
COPIED_BYTES = 1 << 20
SCHEMES = ("file", "memory", "s3")
"""Stores whose fsspec driver creates a key only if it does not exist (S3: If-None-Match)."""

_T = TypeVar("_T")


class Place(Protocol):
    """`poll_s`: seconds between two looks for new keys."""

    poll_s: float

    def keys(self, prefix: str) -> list[str]:
        """All keys below `prefix`, sorted; empty if there are none."""
        ...

    def read(self, key: str, max_bytes: int) -> bytes: ...

    def create(self, key: str, data: bytes) -> bool:
        """Creates `key`. Returns False, and changes nothing, if it exists."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Replaces `key`. A power cut may bring the former content back."""
        ...

    def upload(self, key: str, source: Path) -> tuple[int, str]:
        """Writes `key` from a file. Returns size in bytes and SHA-256 of what was written. `sync` makes its name
        durable."""
        ...

    def sync(self, prefix: str) -> None:
        """Syncs the directory `prefix`: files uploaded into it survive a power cut."""
        ...

    def download(self, key: str, target: Path) -> tuple[int, str]:
        """Writes a new file. Returns size in bytes and SHA-256."""
        ...

    def remove(self, prefix: str) -> None:
        """Removes `prefix` and all keys below it; ignores missing ones."""
        ...


def open_place(text: str, replica: str) -> Place:
    """`text`: a directory, or a URL. Raises InvalidValueError, UnknownNameError."""
    scheme, separator, _ = text.partition("://")
    if not text or "\0" in text:
        raise InvalidValueError(f"--registry {text!r}: must be a directory or a URL such as s3://bucket/registry")
    if not separator:
        return DirectoryPlace(Path(text).expanduser().absolute(), replica)
    if scheme not in SCHEMES:
        raise UnknownNameError("scheme", scheme, SCHEMES, f"--registry {text}")
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidValueError(f"--registry {text}: must have a full path, as file:///srv/registry")
        return DirectoryPlace(Path(url2pathname(parts.path)), replica)
    return ObjectPlace(text)


class DirectoryPlace:
    """`root` is never created again once it existed: if a mount is lost, nothing may be written below its mount point.

    Needs a file system with hard links, which make `create` exclusive (NFS has them).
    """

    poll_s = 0.05

    def __init__(self, root: Path, replica: str) -> None:
        self.root, self._unfinished = root, root / UNFINISHED / replica
        self._durable: set[Path] = set()  # directories whose names this process has made durable

    def keys(self, prefix: str) -> list[str]:
        if not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory is gone", str(self.root))
        found: list[str] = []
        waiting = [prefix]
        while waiting:
            below = waiting.pop()
            try:
                entries = list(os.scandir(self.root / below))
            except FileNotFoundError:
                continue
            for entry in entries:
                key = f"{below}/{entry.name}" if below else entry.name
                (waiting if entry.is_dir(follow_symlinks=False) else found).append(key)
        return sorted(found)

    def read(self, key: str, max_bytes: int) -> bytes:
        with (self.root / key).open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(self.root / key))
        return data

    def create(self, key: str, data: bytes) -> bool:
        with self._written(key, lambda file: file.write(data)) as (temporary, target):
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            self.sync(os.path.dirname(key))
        return True

    def put(self, key: str, data: bytes) -> None:
        with self._written(key, lambda file: file.write(data), is_synced=False) as (temporary, target):
            os.replace(temporary, target)

    def upload(self, key: str, source: Path) -> tuple[int, str]:
        digest = hashlib.sha256()
        with source.open("rb") as opened:
            with self._written(key, lambda file: _copied(opened, file, digest)) as (temporary, target):
                os.replace(temporary, target)
            return opened.tell(), digest.hexdigest()

    def sync(self, prefix: str) -> None:
        directory = self.root / prefix
        fsync_directory(directory)
        made = []
        while directory != self.root and directory not in self._durable:
            made.append(directory)
            directory = directory.parent
            fsync_directory(directory)
        self._durable.update(made)

    def download(self, key: str, target: Path) -> tuple[int, str]:
        digest = hashlib.sha256()
        with (self.root / key).open("rb") as source, target.open("xb") as file:
            return _copied(source, file, digest), digest.hexdigest()

    def remove(self, prefix: str) -> None:
        path = self.root / prefix
        self._durable.discard(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # POSIX: unlink(2) of a directory is EPERM
            shutil.rmtree(path)

    def clear_unfinished(self) -> None:
        """Removes what this replica left half written. Never call it while this replica writes."""
        shutil.rmtree(self._unfinished, ignore_errors=True)

    @contextlib.contextmanager
    def _written(
        self, key: str, fill: Callable[[Any], object], *, is_synced: bool = True
    ) -> Iterator[tuple[Path, Path]]:
        """A temporary file, and the path that it is for, whose directory exists. Removes the temporary file."""
        target = self.root / key
        for directory in (self._unfinished, target.parent):
            self._make(directory)
        temporary = self._unfinished / secrets.token_hex(8)
        try:
            with temporary.open("xb") as file:
                fill(file)
                file.flush()
                if is_synced:
                    os.fsync(file.fileno())
            yield temporary, target
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def _make(self, directory: Path) -> None:
        """Creates a directory below the root, which must exist."""
        missing = [each for each in [directory, *directory.parents] if each.is_relative_to(self.root)]
        for each in reversed(missing[:-1]):
            with contextlib.suppress(FileExistsError):
                each.mkdir()
                self._durable.discard(each)


class ObjectPlace:
    """An object store by its fsspec driver. Listings are not cached. Credentials: as the driver finds them, for S3 in
    AWS_ACCESS_KEY_ID, ~/.aws or the machine's role; AWS_ENDPOINT_URL names another service than Amazon's."""

    poll_s = 1.0

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise InvalidValueError(f"--registry {url}: {error}; `pip install kt-runtime[s3]` has it") from None
        except ValueError as error:
            raise InvalidValueError(f"--registry {url}: {error}") from None
        self.url, self._root = url, str(path).rstrip("/")

    def keys(self, prefix: str) -> list[str]:
        self._call(self._store.invalidate_cache)
        found = self._call(self._store.find, f"{self._root}/{prefix}")
        root = self._root.lstrip("/")
        return sorted(str(key).lstrip("/").removeprefix(f"{root}/") for key in found)

    def read(self, key: str, max_bytes: int) -> bytes:
        data: bytes = self._call(self._store.cat_file, self._at(key))
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", self._at(key))
        return data

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._call(partial(self._store.pipe_file, self._at(key), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._call(self._store.pipe_file, self._at(key), data)

    def upload(self, key: str, source: Path) -> tuple[int, str]:
        found = source.stat().st_size, _digest(source)
        self._call(self._store.put_file, str(source), self._at(key))
        return found

    def sync(self, prefix: str) -> None:
        """An object that was uploaded is durable."""

    def download(self, key: str, target: Path) -> tuple[int, str]:
        self._call(self._store.get_file, self._at(key), str(target))
        return target.stat().st_size, _digest(target)

    def remove(self, prefix: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(partial(self._store.rm, self._at(prefix), recursive=True))

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        try:
            return function(*arguments)
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error


def _copied(source: Any, target: Any, digest: Any) -> int:
    size = 0
    while part := source.read(COPIED_BYTES):
        target.write(part)
        size += len(part)
        digest.update(part)
    return size


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
