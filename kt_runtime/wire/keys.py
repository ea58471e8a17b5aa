"""CURVE keys as text: 40 characters of Z85 (ZMQ RFC 32), as `zmq.curve_keypair()` makes them."""

from __future__ import annotations

from zmq.utils import z85

from kt_runtime.errors import InvalidValueError


def key_bytes(key: str, what: str) -> bytes:
    """The 32 bytes of `key`. Raises InvalidValueError, which names the key as `what` and does not show it."""
    try:
        decoded = z85.decode(key.encode())
    except (ValueError, KeyError, IndexError):
        decoded = b""
    if len(key) != 40 or len(decoded) != 32:
        raise InvalidValueError(f"{what}: not a CURVE key; it must be 40 characters of Z85, this has {len(key)}")
    return decoded
