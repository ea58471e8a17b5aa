"""The JSON files of a registry. Each is read whole and checked: nothing of a half-written or foreign file is used."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kt_runtime.errors import InvalidValueError

FORMAT = 1
MAX_BYTES = 4 << 20
"""Largest size of a record in bytes. A heartbeat has an entry for each name."""

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
NameText = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}\Z")]
DataPlace = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}/[0-9a-f]{16}-[0-9a-f]{16}\Z")]
Format = Annotated[int, msgspec.Meta(ge=FORMAT, le=FORMAT)]


class File(msgspec.Struct, kw_only=True, frozen=True):
    """`size`: bytes. `sha256`: of the content."""

    name: NameText
    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Digest


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """What `name` means from `revision` on. `version`: the content hash, None: the name was unloaded.

    `base`: fingerprint of the weights that the version is for. `data`: the place of `files` below data/. `replica`,
    `source`, `published_at` (Unix time of the publisher's clock, seconds): for people only.
    """

    format: Format = FORMAT
    name: NameText
    revision: Annotated[int, msgspec.Meta(ge=1)]
    version: Digest | None
    base: Digest
    replica: NameText
    source: str = ""
    published_at: float = 0.0
    data: DataPlace | None = None
    files: list[File] = []

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if (self.version is None) != (self.data is None) or (self.version is None) != (not names):
            raise ValueError("a version needs its files, and an unloaded name has none")
        if len(set(names)) != len(names):
            raise ValueError("a file is named twice")


class Base(msgspec.Struct, kw_only=True, frozen=True):
    """`registry`: a random id. `fingerprint`: of the weights that all versions are for. `model`: its name, for people.

    `shape`: numbers of the model's config that a server can compare before it loads the model.
    """

    format: Format = FORMAT
    registry: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    fingerprint: Digest
    model: str
    shape: dict[str, int | str] = {}


class ServedRevision(msgspec.Struct, kw_only=True, frozen=True):
    """`revision`: the newest that is in effect, 0: none. `problem`: why a newer one is not."""

    revision: int
    version: str | None = None
    problem: str | None = None


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True):
    """`beat`: counts up while the replica lives. `written_at`: Unix time of its clock, seconds; for people only."""

    format: Format = FORMAT
    replica: NameText
    beat: int
    url: str
    written_at: float
    names: dict[str, ServedRevision] = {}


_R = TypeVar("_R", Manifest, Base, Heartbeat)


def encoded(record: Manifest | Base | Heartbeat) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decoded(data: bytes, kind: type[_R], where: str) -> _R:
    """Raises InvalidValueError for anything but a whole record of this kind and format."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"{where}: not a {kind.__name__.lower()} of format {FORMAT}: {error}") from None
