"""The protocol's version rises with its requests: two sides of one version read every request alike."""

from __future__ import annotations

import hashlib
import json

import msgspec

from kt_runtime.wire import codec, messages, replies

REQUESTS_OF_VERSION = {
    3: "434a14b8b43ed70c",
    4: "5fee8e8b126e334c",
    5: "85cd1b7dbaccce64",
    6: "39b4387d551db9b3",
    7: "04cbc8464646085e",
}
"""By version, the digest of all requests' fields, types and bounds. A new digest is a new version: add a line."""


def digest_of_requests() -> str:
    schema, parts = msgspec.json.schema_components([messages.AnyRequest])
    for part in parts.values():
        part.pop("description", None)
        part.get("properties", {}).get("version", {}).pop("default", None)
    return hashlib.sha256(json.dumps([schema, parts], sort_keys=True).encode()).hexdigest()[:16]


def test_requests_that_change_raise_the_version() -> None:
    assert REQUESTS_OF_VERSION[messages.PROTOCOL_VERSION] == digest_of_requests()
    assert max(REQUESTS_OF_VERSION) == messages.PROTOCOL_VERSION
    assert len(set(REQUESTS_OF_VERSION.values())) == len(REQUESTS_OF_VERSION)


def test_a_reply_of_a_later_server_is_read() -> None:
    frames = codec.encode(replies.SavedReply(request_id="a", path="/p", content_hash="h", step=3))
    later = msgspec.msgpack.decode(frames[1]) | {"seconds": 1.5}
    reply, _ = codec.decode_reply([frames[0], msgspec.msgpack.encode(later), frames[2]])
    assert isinstance(reply, replies.SavedReply) and reply.step == 3


def test_a_client_of_another_version_can_read_that_it_is_refused() -> None:
    """`ErrorReply` has these fields in every version."""
    frames = codec.encode(replies.ErrorReply(request_id="a", category="user", kind="ProtocolError", message="m"))
    wanted = {"type": "error", "request_id": "a", "category": "user", "kind": "ProtocolError", "message": "m"}
    assert msgspec.msgpack.decode(frames[1]) == wanted
