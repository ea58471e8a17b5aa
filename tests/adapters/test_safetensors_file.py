from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from kt_runtime.adapters.safetensors_file import DTYPES, read_tensors, write_tensors
from kt_runtime.errors import AdapterError


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin: int, end: int, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_what_the_reference_library_writes_is_read_bit_for_bit() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(2, 2, 2).to(torch.bfloat16),
        "c": torch.randn(7).to(torch.float16),
        "empty": torch.empty(0, 4),
    }
    read = read_tensors(bytearray(save(tensors, {"format": "pt"})), "file")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)


def test_what_is_written_is_read_by_the_reference_library(tmp_path: Path) -> None:
    stack = torch.randn(3, 4, 5)
    tensors = {"x": stack[1], "y": stack[2].T, "n": torch.arange(3), "s": torch.tensor(2.0)}
    write_tensors(tmp_path / "file", tensors)
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert read_tensors(bytearray((tmp_path / "file").read_bytes()), "file", DTYPES).keys() == tensors.keys()


def test_a_dtype_can_be_asked_for(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"x": torch.tensor([1.0, 1 / 3])}, torch.bfloat16)
    assert load_file(tmp_path / "file")["x"].dtype == torch.bfloat16


def test_a_file_cut_anywhere_is_refused() -> None:
    whole = save({"a": torch.randn(4, 3), "b": torch.randn(2)})
    for size in range(len(whole)):
        with pytest.raises(AdapterError, match=r"file: .*truncated"):
            read_tensors(bytearray(whole[:size]), "file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file_of(b"{}", length=2**63), "header claims 9223372036854775808 bytes"),
        (file_of(b"{}", length=2**64 - 1), "header claims 18446744073709551615 bytes"),
        (file_of(b"{}", length=100_000_000), "truncated in the header"),
        (file_of(b"not json"), "not JSON"),
        (file_of(b"\xff\xfe{}"), "not JSON"),
        (file_of(b"[" * 100_000), "not JSON"),
        (file_of(b'{"a": {"dtype": "F32", "shape": [' + b"1" * 5000 + b"]}}"), "not JSON"),
        (file_of(b'{"a": {"dtype": "F32", "shape": [' + b"1" * 4000 + b'], "data_offsets": [0, 4]}}'), "has shape"),
        (file_of({"a": entry(0, 2**64)}), "has data_offsets"),
        (file_of([]), "not a JSON object"),
        (file_of(b'{"a": {}, "a": {}}'), "'a' appears twice"),
        (file_of({"__metadata__": {"x": 1}}), "__metadata__"),
        (file_of({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "'a' must have exactly"),
        (file_of({"a": entry(0, 8, dtype="F64")}, bytes(8)), "'a' has dtype 'F64'"),
        (file_of({"a": entry(0, 4, dtype="I32")}, bytes(4)), "'a' has dtype 'I32'; expected one of F32, BF16, F16"),
        (file_of({"a": entry(0, 4, dtype="X")}, bytes(4)), "'a' has dtype 'X'"),
        (file_of({"a": entry(0, 4, shape=(-1,))}, bytes(4)), "'a' has shape"),
        (file_of({"a": entry(0, 4, shape=(True,))}, bytes(4)), "'a' has shape"),
        (file_of({"a": entry(0, 4, shape=(1,) * 9)}, bytes(4)), "'a' has shape"),
        (file_of({"a": entry(0, 4, shape=(2,))}, bytes(4)), "'a' has 4 bytes; shape .2. of F32 needs 8"),
        (file_of({"a": entry(0, 4, shape=(2**62, 2**62))}, bytes(4)), "'a' has 4 bytes"),
        (file_of({"a": entry(4, 0)}, bytes(4)), "'a' has data_offsets"),
        (file_of({"a": entry(-4, 0)}, bytes(4)), "'a' has data_offsets"),
        (file_of({"a": entry(0, 8, shape=(2,))}, bytes(4)), "offsets out of range: 'a'"),
        (file_of({"a": entry(2**63, 2**63 + 4)}, bytes(4)), "'a' has data_offsets"),
        (file_of({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)), "'b' .* overlaps 'a'"),
        (file_of({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)), "'b' .* overlaps 'a'"),
        (file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "'b' .* leaves a gap after 'a'"),
        (file_of({"a": entry(0, 4)}, bytes(5)), "1 bytes after the last tensor"),
    ],
)
def test_a_lying_header_is_refused_before_data_is_read(data: bytearray, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_tensors(data, "file")


DIGITS = 5000
HOSTILE = {
    "an integer of 5,000 digits": b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % (b"9" * DIGITS),
    "an offset of 4,300 digits": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % (b"9" * 4300),
    "a product of 8,000 digits": b'{"x":{"dtype":"F32","shape":[1%s,1%s],"data_offsets":[0,4]}}'
    % (b"0" * 4000, b"0" * 4000),
    "lists in lists": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects in objects": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    "a name twice": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],'
    b'"data_offsets":[0,4]}}',
    "an offset below 0": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    "an offset that is no integer": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,1e400]}}',
    "NaN": b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    "a surrogate alone": b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
    "a dtype that is a list": b'{"x":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
    "no UTF-8": b'{"\xff":1}',
    "zeros": b"\0" * 1000,
    "a name of a megabyte": b'{"%s":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}' % (b"n" * (1 << 20)),
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_the_file_s_fault(header: bytes) -> None:
    with pytest.raises(AdapterError, match=r"^file: "):
        read_tensors(file_of(header, b"\0" * 4), "file")


def test_a_header_longer_than_its_reader_expects_is_not_parsed() -> None:
    header = json.dumps({"__metadata__": {"a": "b" * 5000}, "x": entry(0, 4)}).encode()
    data = file_of(header, b"\0" * 4)
    assert read_tensors(data, "file").keys() == {"x"}
    with pytest.raises(AdapterError, match="at most 4096 are accepted"):
        read_tensors(data, "file", max_header_bytes=4096)
