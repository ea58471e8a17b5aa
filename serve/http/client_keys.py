"""Keys of clients, each with limits of its own: `serve --client-keys FILE`.

    [team-a]
    key = "sk-team-a-7d1f"
    requests_at_once = 8          # answers under way; a stream counts until it ends
    requests_per_minute = 600     # on average; as many may come in one second after a quiet minute
    tokens_at_once = 65536        # of prompts, and the most that the answers under way may have
    tokens_per_minute = 200000    # of prompts and answers, on average

A client may ask the model and read the server's state. Only the server's own key changes the server. A request beyond a
limit is refused with status 429 and `Retry-After`; it counts against no limit. Time is monotonic.
"""

from __future__ import annotations

import hmac
import math
import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError, NotFoundError, suggestion
from kt_runtime.files import open_regular, read_at
from kt_runtime.sglang_patch.frontend.overload import OverLimit

MAX_FILE_BYTES = 1 << 20
MAX_LIMIT = 1_000_000_000
RETRY_SECONDS = 1
"""Retry-After for a client that waits for the end of its own requests, whose time is unknown."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Limits:
    """The limits of one client. None: no limit."""

    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_at_once: int | None = None
    tokens_per_minute: int | None = None


_LIMITS = tuple(field.name for field in fields(Limits))


@dataclass(frozen=True)
class Refused:
    """`retry_after_s`: whole seconds after which the client should try again."""

    message: str
    retry_after_s: int


class _Minute:
    """How much of `per_minute` is left: it comes back evenly, up to `per_minute`. Below 0 after a larger use."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left, self._counted_at = float(per_minute), clock()

    def wait_s(self) -> int:
        """Whole seconds until at least one is left; 0 if one is."""
        now = self._clock()
        earned = (now - self._counted_at) * self._per_minute / 60
        self._left, self._counted_at = min(float(self._per_minute), self._left + earned), now
        return 0 if self._left >= 1 else math.ceil((1 - self._left) * 60 / self._per_minute)

    def use(self, count: int) -> None:
        self._left -= count


class Client:
    """A client, its requests and their tokens. Only one thread, the frontend's, may call it."""

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.limits = name, limits
        self.num_running = self.tokens_running = 0
        self._requests = None if limits.requests_per_minute is None else _Minute(limits.requests_per_minute, clock)
        self._tokens = None if limits.tokens_per_minute is None else _Minute(limits.tokens_per_minute, clock)

    def begin(self) -> ClientRequest | Refused:
        """Counts a request, whose `end` must follow; or says why it is refused, and counts nothing."""
        limits = self.limits
        if limits.requests_at_once is not None and self.num_running >= limits.requests_at_once:
            return Refused(
                f"{self.num_running} requests of the client {self.name!r} are under way, which is its limit",
                RETRY_SECONDS,
            )
        if self._tokens is not None and (wait_s := self._tokens.wait_s()):
            return Refused(
                f"the client {self.name!r} may use {limits.tokens_per_minute} tokens a minute, and has used them",
                wait_s,
            )
        if self._requests is not None:
            if wait_s := self._requests.wait_s():
                return Refused(
                    f"the client {self.name!r} may send {limits.requests_per_minute} requests a minute", wait_s
                )
            self._requests.use(1)
        self.num_running += 1
        return ClientRequest(self)

    def used(self, num_tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        if self._tokens is not None:
            self._tokens.use(num_tokens)


class ClientRequest:
    """A request under way: `sglang_patch.frontend.overload` counts its tokens."""

    def __init__(self, client: Client) -> None:
        self._client, self._reserved = client, 0
        self._answered: dict[str, int] = {}

    def take(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Before a prompt is computed, whose answers have at most `num_new_tokens` together.

        Raises OverLimit, and InvalidValueError for one that no wait would help.
        """
        client, tokens = self._client, num_prompt_tokens + num_new_tokens
        most = client.limits.tokens_at_once
        if most is not None and client.tokens_running + tokens > most:
            what = f"a prompt of {num_prompt_tokens} tokens and up to {num_new_tokens} new ones are {tokens}"
            if self._reserved + tokens > most:
                raise InvalidValueError(f"{what}; a request of the client {client.name!r} may have {most} tokens")
            raise OverLimit(
                f"{what}, beside {client.tokens_running} of the client's requests under way; {client.name!r} may have "
                f"{most} tokens at once"
            )
        self._reserved += tokens
        client.tokens_running += tokens
        client.used(num_prompt_tokens)

    def answered(self, sequence: str, num_tokens: int) -> None:
        """`num_tokens`: of this answer until now. Also after `end`, for what the engine computed in the meantime."""
        self._client.used(num_tokens - self._answered.get(sequence, 0))
        self._answered[sequence] = num_tokens

    def end(self) -> None:
        self._client.num_running -= 1
        self._client.tokens_running -= self._reserved


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
    limits = Limits(**{field: _limit(where, table, field) for field in _LIMITS})
    return ClientKey(Client(name, limits), digest)


def _limit(where: str, table: dict[str, Any], field: str) -> int | None:
    found = table.get(field)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MAX_LIMIT:
        raise InvalidValueError(f"{where}: {field} is {found!r}; allowed are 1 to {MAX_LIMIT}")
    return found
