"""Checks `Host` and `Origin` for a server without a key, which answers this machine's programs and its own pages.

A web page in a browser on this machine can reach a server at loopback. Three headers, which a page can't set, tell the
origin of a request:

- `Host` is the host name of the requested URL. With DNS rebinding (an attacker's name that resolves to 127.0.0.1) it is
  the attacker's name. A server at loopback accepts only loopback names; other servers also accept addresses and this
  machine's own name, since a rebound name is neither.
- `Origin` names the page. It must be the server itself, or one of `--cors-origin`.
- `Sec-Fetch-Site` is sent where browsers omit `Origin`: images, links, forms with GET.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from kt_runtime.errors import InvalidValueError


class OriginPolicy:
    """`host`: the address that the server binds to. `allowed`: origins of other sites, from `--cors-origin`."""

    def __init__(self, host: str, allowed: Collection[str] = ()) -> None:
        self.is_local = is_loopback(host)
        self.allowed = frozenset(checked_origin(origin) for origin in allowed)
        self._names = frozenset() if self.is_local else _own_names(host)

    def problem(self, headers: Iterable[tuple[bytes, bytes]], scheme: str = "http") -> str | None:
        """The foreign header of a request, such as "Host 'example.org'", or None.

        `scheme`: "https" if the connection uses TLS (`--ssl-certfile`), or if a proxy on this machine reports TLS.
        """
        headers = list(headers)
        hosts = [value for name, value in headers if name == b"host"]
        for host in hosts:
            if not self._answers_to(_name_of(b"http://" + host)):
                return f"Host {_shown(host)}"
        origins = [value for name, value in headers if name == b"origin"]
        for origin in origins:
            if not self._knows(origin, hosts, scheme):
                return f"Origin {_shown(origin)}"
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if not origins and any(site not in (b"same-origin", b"none") for site in sites):
            return "a page of another site"
        return None

    def allows(self, origin: bytes) -> bool:
        return origin.decode("latin-1") in self.allowed

    def _answers_to(self, name: str | None) -> bool:
        if name is None:
            return False
        if _is_loopback_name(name):
            return True
        return not self.is_local and (name.lower() in self._names or _is_address(name))

    def _knows(self, origin: bytes, hosts: list[bytes], scheme: str) -> bool:
        own = [scheme.encode() + b"://" + host.lower() for host in hosts]
        return self.allows(origin) or origin.lower() in own


def checked_origin(origin: str) -> str:
    """`origin` as browsers write it: scheme, name and port, no path. Raises InvalidValueError."""
    try:
        parts = urlsplit(origin)
        _ = parts.port
        fits = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and f"{parts.scheme}://{parts.netloc}" == origin
        )
    except ValueError:
        fits = False
    if not fits or "@" in origin or origin != origin.lower() or not origin.isascii():
        raise InvalidValueError(
            f"--cors-origin {origin!r}: must be the origin of a site as browsers write it, such as https://example.org "
            "or http://localhost:3000: in small letters, without a path or a closing slash"
        )
    return origin


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`. All addresses of a name must be loopback."""
    if _is_loopback_name(host):
        return True
    if _is_address(host):
        return False
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _own_names(host: str) -> frozenset[str]:
    own = socket.gethostname().lower()
    return frozenset({host.lower(), own, own.partition(".")[0]}) - {""}


def _is_loopback_name(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _name_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("ascii")).hostname
    except ValueError:
        return None


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
