"""What of a record's bytes is checked: everything."""

from __future__ import annotations

import struct
import zlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.cache.format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    LONGEST_KEY,
    Fault,
    Header,
    Namespace,
    check_record,
    checksum,
    encode_header,
)
from kt_runtime.errors import InvalidValueError

NAMESPACE = b"n" * 16
OTHER = b"o" * 16


def record(key: bytes, payload: bytes, namespace: bytes = NAMESPACE, version: int = FORMAT_VERSION) -> bytearray:
    header = Header(version, key, len(payload), 7, checksum([payload]), namespace)
    return bytearray(encode_header(header) + payload)


def fault_of(data: bytearray, key: bytes, size: int) -> Fault | None:
    return check_record(data[:HEADER_BYTES], [data[HEADER_BYTES : HEADER_BYTES + size]], NAMESPACE, key)


@given(st.binary(min_size=1, max_size=LONGEST_KEY).filter(lambda key: 0 not in key), st.binary(max_size=300))
def test_a_record_is_itself(key: bytes, payload: bytes) -> None:
    assert fault_of(record(key, payload), key, len(payload)) is None


@given(st.data())
def test_no_flipped_bit_goes_unseen(data: st.DataObject) -> None:
    payload = data.draw(st.binary(min_size=1, max_size=100))
    bytes_ = record(b"key", payload)
    # the last 12 bytes of the header are filling: nothing depends on them
    places = [place for place in range(len(bytes_)) if not HEADER_BYTES - 12 <= place < HEADER_BYTES]
    place = data.draw(st.sampled_from(places))
    bytes_[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fault_of(bytes_, b"key", len(payload)) is not None


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 99])
def test_a_cut_off_record_is_not_right(length: int) -> None:
    data = record(b"key", bytes(range(100)))[:length]
    assert fault_of(data + bytes(HEADER_BYTES + 100 - length), b"key", 100) is not None


def test_what_is_wrong_is_named() -> None:
    assert fault_of(record(b"key", b"x" * 9), b"other", 9) is Fault.SWAPPED
    assert fault_of(record(b"key", b"x" * 9, namespace=OTHER), b"key", 9) is Fault.FOREIGN
    assert fault_of(record(b"key", b"x" * 9, version=FORMAT_VERSION + 1), b"key", 9) is Fault.OLD_FORMAT
    assert fault_of(record(b"key", b"x" * 9), b"key", 8) is Fault.WRONG_LENGTH
    assert fault_of(bytearray(HEADER_BYTES + 9), b"key", 9) is Fault.EMPTY
    data = record(b"key", b"x" * 9)
    data[HEADER_BYTES + 3] ^= 1
    assert fault_of(data, b"key", 9) is Fault.DAMAGED


def test_the_layout_of_the_header_stays() -> None:
    data = record(b"ab", b"payload")
    assert data[:4] == b"KTPG"
    assert struct.unpack_from("<HHQQQ", data, 4) == (FORMAT_VERSION, 2, 7, 7, xxhash.xxh3_64_intdigest(b"payload"))
    assert data[32:48] == NAMESPACE
    assert data[48:144] == b"ab".ljust(96, b"\0")
    assert struct.unpack_from("<I", data, 144)[0] == zlib.crc32(data[:144])
    assert data[148:] == bytes(12) + b"payload"


def namespace(**changes: object) -> Namespace:
    fields = {"weights": "w", "kv_dtype": "bfloat16", "page_tokens": 64, "layout": "page_first_direct"}
    return Namespace(**(fields | changes))  # type: ignore[arg-type]


def test_every_field_of_the_namespace_counts() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"weights": "v"},
        {"kv_dtype": "float16"},
        {"page_tokens": 128},
        {"layout": "layer_first"},
        {"configuration": "c"},
        {"adapter": "a"},
        {"shard": "1/2"},
        {"configuration": "a", "adapter": "c"},
        {"adapter": "ac"},
    ]
    digests = {namespace(**change).digest() for change in changes}
    assert len(digests) == len(changes)
    assert namespace().digest() == namespace().digest()


def test_a_namespace_without_weights_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="weights is empty"):
        namespace(weights="")
    with pytest.raises(InvalidValueError, match="page_tokens is 0"):
        namespace(page_tokens=0)
