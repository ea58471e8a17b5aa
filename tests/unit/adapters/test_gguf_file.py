"""The container's reader against bytes made by hand: lengths that lie must cost nothing."""

from __future__ import annotations

import struct
import time

import pytest
import torch

from kt_runtime.adapters.gguf_file import parse_gguf
from kt_runtime.errors import AdapterError


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def entry(name: bytes, lengths: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset)


def file(
    keys: list[bytes], entries: list[bytes], data: bytes | bytearray, alignment: int = 32, version: int = 3
) -> bytearray:
    head = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(keys)) + b"".join(keys + entries)
    return bytearray(head + b"\0" * (-len(head) % alignment) + data)


ONE = struct.pack("<8f", *range(8))


@pytest.mark.parametrize("version", [2, 3])
def test_keys_and_tensors_are_read_as_written(version: int) -> None:
    keys = [
        key(b"text", 8, string(b"abc")),
        key(b"number", 6, struct.pack("<f", 1.5)),
        key(b"words", 9, struct.pack("<IQ", 8, 2) + string(b"a") + string(b"bc")),
        key(b"general.alignment", 4, struct.pack("<I", 64)),
    ]
    entries = [entry(b"x", [4, 2], 0, 0), entry(b"y", [3], 30, 64)]
    found = parse_gguf(file(keys, entries, ONE + b"\0" * 32 + b"\x80\x3f" * 3, 64, version), "f")
    assert found.values == {"text": "abc", "number": 1.5, "general.alignment": 64} and found.arrays == {"words": 2}
    assert torch.equal(found.tensors["x"], torch.arange(8.0).reshape(2, 4))
    assert torch.equal(found.tensors["y"], torch.ones(3, dtype=torch.bfloat16))


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytearray(b"GGML" + bytes(20)), "no GGUF file: begins with b'GGML'"),
        (bytearray(b"GGUF\0\0\0\3" + bytes(16)), "is big-endian"),
        (file([], [], b"", version=1), "is version 1"),
        (bytearray(b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0)), "truncated"),
        (bytearray(b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE)), "truncated"),
        (file([struct.pack("<Q", HUGE)], [], b""), "truncated"),
        (file([key(b"a", 9, struct.pack("<IQ", 4, HUGE))], [], b""), "truncated"),
        (file([key(b"a", 9, struct.pack("<IQ", 8, HUGE))], [], b""), "truncated"),
        (file([key(b"a", 9, struct.pack("<IQ", 9, 1))], [], b""), "an array of type 9"),
        (file([key(b"a", 77, b"")], [], b""), "unknown type 77"),
        (file([key(b"\xff", 7, b"\1")], [], b""), "is not UTF-8"),
        (file([key(b"a", 7, b"\1")] * 2, [], b""), "key 'a' appears twice"),
        (file([], [entry(b"x", [8], 0, 0), entry(b"x", [8], 0, 32)], ONE * 2), "tensor 'x' appears twice"),
        (file([], [entry(b"x", [8], 0, 0), entry(b"y", [8], 0, 0)], ONE), "'y' has offset 0; expected 32"),
        (file([], [entry(b"x", [8], 0, 32)], ONE * 2), "'x' has offset 32; expected 0"),
        (file([], [entry(b"x", [9], 0, 0)], ONE), "truncated: tensor 'x' ends at byte"),
        (file([], [entry(b"x", [HUGE, HUGE, HUGE, HUGE], 0, 0)], ONE), "truncated: tensor 'x'"),
        (file([], [entry(b"x", [1] * 5, 0, 0)], ONE), "5 dimensions"),
        (file([], [entry(b"x", [0, 1 << 63], 0, 0)], b""), "tensor 'x' is empty"),
        (file([], [entry(b"x", [8], 99, 0)], ONE), "type 99, which is unknown"),
        (file([], [entry(b"x", [8], 0, 0)], ONE * 3), "64 bytes after the last tensor"),
        (file([], [], bytearray(20 << 20)), "bytes after the last tensor"),
        (file([key(b"a", 9, struct.pack("<IQ", 0, 17 << 20)) + bytes(17 << 20)], [], b""), "take more than 16777216"),
    ],
)
def test_bytes_that_are_no_gguf_file_are_refused_at_once(data: bytearray, message: str) -> None:
    seconds = []
    for _ in range(3):  # the least: a collection of garbage takes longer
        started = time.process_time()
        with pytest.raises(AdapterError, match=f"^f: .*{message}"):
            parse_gguf(data, "f")
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.0004  # 0.04 ms measured
