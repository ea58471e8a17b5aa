from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from kt_runtime.adapters import open_directory, paths, safetensors_file
from kt_runtime.adapters.paths import OpenFile
from kt_runtime.adapters.safetensors_file import DTYPES, read_tensor_file, read_tensors, write_tensors
from kt_runtime.direct_file import BLOCK_BYTES
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


@pytest.mark.parametrize("part_bytes", [1, 100, safetensors_file.PART_BYTES])
def test_a_file_is_read_into_one_piece_of_memory_in_an_order_of_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Groups of one dtype without a gap, in order of their numbers; the result in the file's order. By one thread or
    several."""
    monkeypatch.setattr(safetensors_file, "PART_BYTES", part_bytes)
    tensors = {f"{name}.{i}": torch.randn(3, 5) for i in (2, 0, 10, 1) for name in "yx"}
    tensors |= {"x.3": torch.randn(7).to(torch.bfloat16), "alone": torch.randn(()), "x.4": torch.empty(0, 4)}
    (tmp_path / "file").write_bytes(save(tensors))
    order = list(read_tensors(bytearray((tmp_path / "file").read_bytes()), "file"))

    def place(name: str) -> tuple[str, str, int]:
        group, _, number = name.partition(".")
        return group, "", int(number or 0)

    with open_directory(tmp_path) as directory, directory.open("file", 1 << 20) as file:
        read = read_tensor_file(file, place)
    assert list(read) == order
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
    assert len({each.untyped_storage().data_ptr() for each in read.values()}) == 1
    for group in "xy":
        at = [read[f"{group}.{i}"].storage_offset() for i in (0, 1, 2)]
        assert (at[1] - at[0], at[2] - at[1]) == (15, 15) and at[0] % 16 == 0
    assert read["y.10"].storage_offset() == read["y.2"].storage_offset() + 15


def test_a_file_that_becomes_longer_while_its_tensors_are_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(data := save({"x": torch.randn(3)}))
    monkeypatch.setattr(paths, "pause", lambda: os.truncate(tmp_path / "file", len(data) + 1))
    with (
        open_directory(tmp_path) as directory,
        directory.open("file", 1 << 20) as file,
        pytest.raises(AdapterError, match="became longer while it was read"),
    ):
        read_tensor_file(file, lambda name: (name, "", 0))


def test_nothing_of_a_file_is_read_before_its_header_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenFile, "spread", lambda *_: pytest.fail("read"))
    refused: dict[str, bytes | bytearray] = {
        "truncated: 3 bytes": b"abc",
        "truncated in the header": file_of({}, length=99),
        "dtype": file_of({"x": entry(0, 4, dtype="I32")}, b"1234"),
        "at most 10 are accepted": file_of({"x": entry(0, 4)}, b"1234"),
    }
    for number, (message, data) in enumerate(refused.items()):
        (tmp_path / str(number)).write_bytes(data)
        with (
            open_directory(tmp_path) as directory,
            directory.open(str(number), 1 << 20) as file,
            pytest.raises(AdapterError, match=f"{number}: .*{message}"),
        ):
            read_tensor_file(file, lambda name: (name, "", 0), 10 if "10" in message else 1 << 20)


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


@pytest.mark.parametrize("refused", [False, True])
def test_a_large_file_is_written_past_the_page_cache_and_every_byte_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Where the file system refuses that, it is written as any file."""
    monkeypatch.setattr(safetensors_file, "DIRECT_BYTES", 1)
    directly: list[int] = []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return written(descriptor, data, offset)
        if refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        directly.append(written(descriptor, data[: len(data) // 2 // BLOCK_BYTES * BLOCK_BYTES or len(data)], offset))
        return directly[-1]

    written = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    tensors = {f"t{number}": torch.randn(300_000 + number) for number in range(9)}
    write_tensors(tmp_path / "file", tensors)
    assert all(torch.equal(found, tensors[name]) for name, found in load_file(tmp_path / "file").items())
    size = (tmp_path / "file").stat().st_size
    assert (sum(directly) == 0) if refused else (sum(directly) in (0, size // BLOCK_BYTES * BLOCK_BYTES))


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors_file, "DIRECT_BYTES", 1)
    monkeypatch.setattr(os, "pwrite", pwrite)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_tensors(tmp_path / "file", {"x": torch.randn(10)})
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_cut_anywhere_is_refused() -> None:
    whole = save({"a": torch.randn(4, 3), "b": torch.randn(2)})
    for size in range(len(whole)):
        with pytest.raises(AdapterError, match=r"file: .*truncated"):
            read_tensors(bytearray(whole[:size]), "file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file_of(b"not json"), "not JSON"),
        (file_of({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)), "'b' .* overlaps 'a'"),
        (file_of({"a": entry(0, 8, dtype="F64")}, bytes(8)), "'a' has dtype 'F64'"),
        (file_of({"a": entry(0, 4, dtype="I32")}, bytes(4)), "'a' has dtype 'I32'; expected one of F32, BF16, F16"),
        (file_of({"a": entry(0, 1, dtype="F8_E4M3")}, bytes(1)), "'a' has dtype 'F8_E4M3'; expected one of F32, BF16"),
    ],
)
def test_a_lying_header_is_the_adapter_s_fault(data: bytearray, message: str) -> None:
    with pytest.raises(AdapterError, match=f"^file: .*{message}"):
        read_tensors(data, "file")


def test_a_header_longer_than_its_reader_expects_is_not_parsed() -> None:
    header = json.dumps({"__metadata__": {"a": "b" * 5000}, "x": entry(0, 4)}).encode()
    data = file_of(header, b"\0" * 4)
    assert read_tensors(data, "file").keys() == {"x"}
    with pytest.raises(AdapterError, match="at most 4096 are accepted"):
        read_tensors(data, "file", max_header_bytes=4096)
