"""Files of a checkpoint that somebody else made: what is refused, what is said of it, and what memory that takes."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from kt_runtime import checkpoint_file, files
from kt_runtime.checkpoint_file import DTYPE_BYTES, MEMORY_FACTOR, open_tensors, read_header, read_json
from kt_runtime.errors import CheckpointError, NotFoundError


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_what_the_reference_library_writes_is_found(tmp_path: Path) -> None:
    tensors = {
        "z": torch.randn(3, 5),
        'a \N{GRINNING FACE} \\ "': torch.randn(2, 2, 2).to(torch.bfloat16),
        "empty": torch.empty(0, 4).half(),
        "scalar": torch.tensor(7),
        "codes": torch.arange(6).to(torch.uint8).view(torch.float8_e4m3fn),
    }
    path = tmp_path / "file"
    path.write_bytes(save(tensors, {"format": "pt"}))
    content = path.read_bytes()
    with open_tensors(path) as (descriptor, found):
        assert os.pread(descriptor, len(content), 0) == content
    assert found.keys() == tensors.keys() and read_header(path) == found
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].stop - found[name].start == tensor.numel() * DTYPE_BYTES[found[name].dtype]
        assert content[found[name].start : found[name].stop] == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_tensors_come_in_the_order_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(file_of({"b": entry(4, 8), "__metadata__": {}, "a": entry(0, 4)}, bytes(8)))
    assert list(read_header(tmp_path / "file")) == ["b", "a"]


DEEP = b"[" * 100_000
REFUSED = {
    "nothing": (b"", "truncated: 0 bytes, the length of the header alone takes 8"),
    "seven bytes": (bytes(7), "truncated: 7 bytes"),
    "a length of 2^63": (file_of(b"{}", length=2**63), "header claims 9223372036854775808 bytes; at most 100000000"),
    "a length of 2^64 - 1": (file_of(b"{}", length=2**64 - 1), "header claims 18446744073709551615 bytes"),
    "a length beyond the file": (file_of(b"{}", length=100), "truncated in the header: it claims 100 bytes, 2 are"),
    "text": (file_of(b"not json"), "not JSON that is accepted: JSON is malformed: .* .byte 4."),
    "half an object": (file_of(b'{"a": '), "not JSON"),
    "zeros": (file_of(bytes(1000)), "not JSON"),
    "UTF-16": (file_of(b"\xff\xfe{}"), "not JSON"),
    "a byte order mark": (file_of(b"\xef\xbb\xbf{}"), "not JSON"),
    "a name that is no UTF-8": (file_of(b'{"\xff":1}'), "not JSON"),
    "a value that is no UTF-8": (file_of(b'{"a":{"dtype":"\xff"}}'), "'a' is .*utf-8"),
    "half a surrogate pair": (file_of(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), "not JSON"),
    "something after the end": (file_of(b"{}x"), "not JSON"),
    "a comma too many": (file_of(b'{"a":1,}'), "not JSON"),
    "a list": (file_of([1, 2]), "not a JSON object"),
    "lists in lists": (file_of(b'{"x":' + DEEP), "nested too deeply"),
    "objects in objects": (file_of(b'{"x":' * 100_000), "nested too deeply"),
    "a number": (file_of({"a": 1}), "header: 'a' is 1: Expected `object`, got `int`"),
    "a missing field": (file_of({"a": {"dtype": "F32", "shape": [1]}}), "'a' is .* required field `data_offsets`"),
    "an unknown field": (file_of({"a": entry(0, 4) | {"b": 1}}, bytes(4)), "'a' is .* unknown field `b`"),
    "a dtype that is a list": (file_of({"a": entry(0, 4) | {"dtype": []}}), r"'a' is .*Expected `str`.*\$.dtype"),
    "an unknown dtype": (
        file_of({"a": entry(0, 4, dtype="F33")}, bytes(4)),
        "'a' has dtype 'F33'; expected one of F64",
    ),
    "a shape below 0": (file_of({"a": entry(0, 4, (-1,))}, bytes(4)), r"'a' is .*>= 0.*\$.shape\[0\]"),
    "a shape of truth": (file_of({"a": entry(0, 4, (True,))}, bytes(4)), r"'a' is .*got `bool`.*\$.shape\[0\]"),
    "nine dimensions": (file_of({"a": entry(0, 4, (1,) * 9)}, bytes(4)), r"'a' is .*length <= 8.*\$.shape"),
    "no element of a huge shape": (
        file_of({"a": entry(0, 0, (2**61, 4, 0))}),
        r"'a' has shape \[2305843009213693952, 4, 0\], larger than any memory",
    ),
    "another size": (file_of({"a": entry(0, 4, (2,))}, bytes(4)), r"'a' has 4 bytes; shape \[2\] of F32 needs 8"),
    "a size over 2^64": (file_of({"a": entry(0, 4, (2**62, 2**62))}, bytes(4)), "'a' has 4 bytes"),
    "three offsets": (file_of({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}), r"'a' is .*\$.data_offsets"),
    "offsets backwards": (file_of({"a": entry(4, 0)}, bytes(4)), r"'a' has data_offsets \[4, 0\]"),
    "an offset below 0": (file_of({"a": entry(-4, 0)}, bytes(4)), r"'a' is .*>= 0.*\$.data_offsets\[0\]"),
    "an offset over 2^63": (file_of({"a": entry(2**63, 2**63 + 4)}, bytes(4)), r"'a' is .*\$.data_offsets\[0\]"),
    "an offset beyond the file": (file_of({"a": entry(0, 8, (2,))}, bytes(4)), "'a' ends at byte 7., the file has 7."),
    "the same bytes": (file_of({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)), "'b' .* overlaps 'a'"),
    "overlapping bytes": (file_of({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)), "'b' .* overlaps 'a'"),
    "a gap": (file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "'b' .* leaves a gap after 'a'"),
    "a gap at the beginning": (file_of({"a": entry(2, 6)}, bytes(6)), "'a' .* leaves a gap after the header"),
    "bytes at the end": (file_of({"a": entry(0, 4)}, bytes(5)), "1 bytes after the last tensor"),
    "metadata that is no text": (file_of({"__metadata__": {"x": 1}}), "'__metadata__' is .*Expected `str`, got `int`"),
}


@pytest.mark.parametrize("number", ["--1", "1-2", "007", "1..e", "+4", ".5", "4.", "0x4", "NaN", "1e400", "9" * 5000])
def test_what_is_no_size_is_refused(tmp_path: Path, number: str) -> None:
    header = f'{{"a":{{"dtype":"F32","shape":[{number}],"data_offsets":[0,4]}}}}'.encode()
    (tmp_path / "file").write_bytes(file_of(header, bytes(4)))
    with pytest.raises(CheckpointError, match=r"not JSON|'a' is .*\$.shape\[0\]"):
        read_header(tmp_path / "file")


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_lying_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{path}: .*{message}") as refused:
        read_header(path)
    assert len(str(refused.value)) < 400 + len(str(path))


FIELDS = b'"dtype":"F32","shape":[1],"data_offsets":[0,4]'


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b'{"a":{%s},"a":{%s}}' % (FIELDS, FIELDS), "a"),
        (b'{"a":{%s},"\\u0061":{%s}}' % (FIELDS, FIELDS), "a"),
        (b'{"a":{"dtype":"I32",%s}}' % FIELDS, "dtype"),
        (b'{"a":{%s},"__metadata__":{},"__metadata__":{}}' % FIELDS, "__metadata__"),
        (b'{"a":{%s},"__metadata__":{"x":"","x":""}}' % FIELDS, "x"),
    ],
)
def test_a_name_that_appears_twice_is_refused(tmp_path: Path, header: bytes, name: str) -> None:
    (tmp_path / "file").write_bytes(file_of(header, bytes(4)))
    with pytest.raises(CheckpointError, match=f"header: '{name}' appears twice"):
        read_header(tmp_path / "file")


MEASURE = """
import ctypes, itertools, json, re, sys
from pathlib import Path
from kt_runtime import checkpoint_file

def status_bytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024

def names(count):
    every = itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4)
    return ("".join(letters) for letters in itertools.islice(every, count))

def header(kind):
    if kind == "checkpoint":
        made = {f"model.layers.3.mlp.experts.{i}.gate_proj.weight": (i, i + 1) for i in range(30_000)}
    else:
        made = {name: (i, i + 1) for i, name in enumerate(names(50_000))}
    entry = '"%s":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}'
    if kind == "a character of four bytes":
        made["\\U0001f600"] = made.pop("aaaa")
    if kind in ("checkpoint", "short names", "a character of four bytes"):
        return ",".join(entry % (name, *offsets) for name, offsets in made.items())
    value = {"numbers": "0", "objects": "{}", "metadata": '""'}.get(kind)
    if value:
        members = ",".join(f'"{name}":{value}' for name in names(250_000))
        return '"__metadata__":{' + members + "}" if kind == "metadata" else members
    return '"a":[' + ",".join(["[]"] * 800_000) + "]"

checkpoint_file.parse_header(b"{}", 10)
for kind in json.load(sys.stdin):
    text = ("{" + header(kind) + "}").encode()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    try:
        checkpoint_file.parse_header(text, 8 + len(text) + text.count(b"data_offsets"))
        accepted = True
    except ValueError:
        accepted = False
    print(json.dumps([kind, accepted, len(text), status_bytes("VmHWM") - before + len(text)]), flush=True)
"""
KINDS = {  # a header, and whether it is accepted
    "checkpoint": True,
    "short names": True,
    "a character of four bytes": True,
    "metadata": True,
    "numbers": False,
    "objects": False,
    "lists": False,
}


@pytest.mark.slow
def test_reading_a_header_takes_bounded_memory() -> None:
    """In processes of its own, since memory that one header took is there for the next."""
    measured = {}
    for kind in KINDS:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], input=json.dumps([kind]), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        kind, accepted, size, taken = json.loads(done.stdout)
        assert accepted == KINDS[kind] and size > 1_500_000, kind
        measured[kind] = taken / size
    assert max(measured.values()) <= MEMORY_FACTOR, measured
    assert max(measured.values()) >= MEMORY_FACTOR / 10, measured  # it was measured


def test_config_s_nan_is_read_and_what_is_no_json_is_not(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": NaN, "b": -Infinity, "c": "\\ud83d\\ude00 \N{GRINNING FACE}"}')
    assert str(read_json(path)) == "{'a': nan, 'b': -inf, 'c': '\N{GRINNING FACE} \N{GRINNING FACE}'}"
    for content in (b"{", b"[1-2]", b"[007]", b'"\\ud800"', b'{"a":1,"a":2}', b"[" * 100_000, b"\xff", b"{} {}", b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"^{path}: not JSON: "):
            read_json(path)


def make_special(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))


@pytest.mark.parametrize("read", [read_header, read_json])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, kind: str, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    path = Path("model.safetensors")
    make_special(path, kind)
    refused: list[BaseException] = []

    def attempt() -> None:
        try:
            read(path)
        except CheckpointError as error:
            refused.append(error)

    reader = threading.Thread(target=attempt, daemon=True)  # a reader that waits for a pipe must not hang the tests
    reader.start()
    reader.join(30)
    assert len(refused) == 1 and str(refused[0]).startswith("model.safetensors: can't be read: ")


def test_links_are_followed_and_missing_files_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(file_of({"a": entry(0, 4)}, bytes(4)))
    (tmp_path / "link").symlink_to("blob")
    assert list(read_header(tmp_path / "link")) == ["a"]
    (tmp_path / "dangling").symlink_to("gone")
    for name in ("dangling", "nothing"):
        with pytest.raises(NotFoundError, match=rf"^{tmp_path / name}: No such file or directory"):
            read_header(tmp_path / name)


def test_an_error_of_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(file_of({"a": entry(0, 4)}, bytes(4)))

    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "pread", failing)
    for read in (read_header, read_json):
        with pytest.raises(CheckpointError, match=rf"^{path}: can't be read: Input/output error"):
            read(path)


def test_a_file_larger_than_expected_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "MAX_JSON_BYTES", 10)
    (tmp_path / "config.json").write_text('{"a": "b" }')
    with pytest.raises(CheckpointError, match=r"has 11 bytes; at most 10 are read"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"a": "b"}')
    assert read_json(tmp_path / "config.json") == {"a": "b"}
