"""Keys of clients, each with limits of its own: `serve --client-keys FILE`.

    [team-a]
    key = "sk-team-a-7d1f"
    requests_at_once = 8          # answers under way; a stream counts until it ends
    requests_per_minute = 600     # on average; as many may come in one second after a quiet minute

A client may ask the model and read the server's state. Only the server's own key changes the server. A request beyond a
limit is refused with status 429 and `Retry-After`; it counts against neither limit. Time is monotonic.
"""

from __future__ import annotations

import hmac
import math
import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError, NotFoundError, suggestion
from kt_runtime.files import open_regular, read_at

MAX_FILE_BYTES = 1 << 20
MAX_LIMIT = 1_000_000
RETRY_SECONDS = 1
"""What a client is told to wait for the end of its own requests, whose time nobody knows."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = ("requests_at_once", "requests_per_minute")


@dataclass(frozen=True)
class Refused:
    """`retry_after_s`: whole seconds after which the client should try again."""

    message: str
    retry_after_s: int


class Client:
    """A client and its requests. Only one thread, the frontend's, may call it. None: no limit."""

    def __init__(
        self,
        name: str,
        requests_at_once: int | None = None,
        requests_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._at_once, self._per_minute, self._clock = requests_at_once, requests_per_minute, clock
        self._running = 0
        self._left = float(requests_per_minute or 0)
        self._counted_at = clock()

    def begin(self) -> Refused | None:
        """Counts a request, which `end` must follow; or says why it is refused, and counts nothing."""
        if self._at_once is not None and self._running >= self._at_once:
            return Refused(
                f"{self._running} requests of the client {self.name!r} are under way, which is its limit", RETRY_SECONDS
            )
        if self._per_minute is not None:
            now = self._clock()
            earned = (now - self._counted_at) * self._per_minute / 60
            self._left, self._counted_at = min(float(self._per_minute), self._left + earned), now
            if self._left < 1:
                wait_s = math.ceil((1 - self._left) * 60 / self._per_minute)
                return Refused(f"the client {self.name!r} may send {self._per_minute} requests a minute", wait_s)
            self._left -= 1
        self._running += 1
        return None

    def end(self) -> None:
        self._running -= 1


@dataclass(frozen=True)
class ClientKey:
    """`digest`: of the key, SHA-256."""

    client: Client
    digest: bytes

    def has(self, digest: bytes) -> bool:
        return hmac.compare_digest(digest, self.digest)


def read_client_keys(path: Path | None, digest_of: Callable[[str], bytes]) -> list[ClientKey]:
    """The keys of a file; none without one. `digest_of`: checks a key and returns its digest.

    Raises NotFoundError, and InvalidValueError for a file that is no such table, which names the client and the field,
    never a key.
    """
    if path is None:
        return []
    found = [_client_key(path, name, table, digest_of) for name, table in _tables(path).items()]
    names: dict[bytes, str] = {}
    for each in found:
        if (other := names.setdefault(each.digest, each.client.name)) != each.client.name:
            raise InvalidValueError(f"--client-keys {path}: {each.client.name!r} has the key of {other!r}")
    if not found:
        raise InvalidValueError(f"--client-keys {path}: names no client; a client is [NAME] with key = '...'")
    return found


def _tables(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as descriptor:
            content = read_at(descriptor, MAX_FILE_BYTES + 1, 0)
    except FileNotFoundError:
        raise NotFoundError(f"--client-keys {path}: no such file") from None
    except OSError as error:
        raise InvalidValueError(f"--client-keys {path}: can't be read: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InvalidValueError(f"--client-keys {path}: has more than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise InvalidValueError(f"--client-keys {path}: is no UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(f"--client-keys {path}: {error}") from None


def _client_key(path: Path, name: str, table: Any, digest_of: Callable[[str], bytes]) -> ClientKey:
    where = f"--client-keys {path}: [{name[:64]}]"
    if not _NAME.fullmatch(name):
        raise InvalidValueError(f"{where}: a client's name has 1 to 64 letters, digits and . _ -")
    if not isinstance(table, dict):
        raise InvalidValueError(f"{where}: expected a table with 'key'")
    for field in table:
        if field != "key" and field not in _LIMITS:
            raise InvalidValueError(f"{where}: unknown field {field[:64]!r}{suggestion(field, ('key', *_LIMITS))}")
    if not isinstance(table.get("key"), str):
        raise InvalidValueError(f"{where}: 'key' is missing or no text")
    try:
        digest = digest_of(table["key"])
    except InvalidValueError as error:
        raise InvalidValueError(f"{where}: {error}") from None
    at_once, per_minute = (_limit(where, table, field) for field in _LIMITS)
    return ClientKey(Client(name, at_once, per_minute), digest)


def _limit(where: str, table: dict[str, Any], field: str) -> int | None:
    found = table.get(field)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MAX_LIMIT:
        raise InvalidValueError(f"{where}: {field} is {found!r}; allowed are 1 to {MAX_LIMIT}")
    return found
