"""The place of a call, from the first and last bytes of its body, whatever these are."""

from __future__ import annotations

import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.serve.tinker.protocol.places import CallPlace, place_of_call
from kt_runtime.serve.tinker.protocol.schema import ForwardBackwardRequest


@given(st.text(min_size=1, max_size=50), st.integers(1, 2**31 - 1), st.binary(max_size=50))
def test_protobuf_has_it_before_the_data(model: str, seq_id: int, rest: bytes) -> None:
    head = ForwardBackwardRequest(model_id=model, seq_id=seq_id).SerializeToString() + rest
    assert place_of_call(head, b"", is_protobuf=True, is_zstd=False) == CallPlace(model, seq_id)
    packed = zstandard.compress(head + bytes(10_000))
    assert place_of_call(packed, b"", is_protobuf=True, is_zstd=True) == CallPlace(model, seq_id)


@given(st.binary(max_size=100), st.binary(max_size=100), st.booleans(), st.booleans())
def test_any_other_bytes_have_none_or_one(head: bytes, tail: bytes, is_protobuf: bool, is_zstd: bool) -> None:
    place = place_of_call(head, tail, is_protobuf=is_protobuf, is_zstd=is_zstd)
    assert place is None or isinstance(place, CallPlace)


def test_json_has_it_at_either_end_and_two_different_places_are_none() -> None:
    one, other = b'{"model_id" : "m", "x": 1', b'1], "seq_id": 12 }'
    assert place_of_call(one, other, is_protobuf=False, is_zstd=False) == CallPlace("m", 12)
    assert place_of_call(one + other, one + other, is_protobuf=False, is_zstd=False) == CallPlace("m", 12)
    assert place_of_call(one + b', "seq_id": 3,', other, is_protobuf=False, is_zstd=False) is None
    assert place_of_call(b"", other, is_protobuf=False, is_zstd=False) is None
