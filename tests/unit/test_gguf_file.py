"""The header of a GGUF file: what the reference library writes is found, what lies is refused, and nothing else.
Lengths that lie cost nothing."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import EACH_RUN_ALIKE, examples

from kt_runtime import gguf_file
from kt_runtime.adapters.gguf_lora import RULES as ADAPTER
from kt_runtime.checkpoint_file import Entry
from kt_runtime.errors import AdapterError, CheckpointError, KtError, NotFoundError
from kt_runtime.gguf_file import BLOCKS, MODEL, parse_gguf, read_gguf, read_gguf_model


def write(path: Path, split: int = 0) -> dict[str, np.ndarray]:
    """A file of several types of keys and tensors; `split`: tensors in each of its files."""
    writer = gguf.GGUFWriter(path, "qwen3moe", split_max_tensors=split)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(["a", "b", "<end>"])
    writer.add_token_types([1, 1, 3])
    writer.add_expert_weights_norm(True)
    tensors = {f"blk.{layer}.attn_q.weight": np.full((4, 32), layer, np.float32) for layer in range(3)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.add_tensor(
        "token_embd.weight",
        gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path)
    return path


def test_what_the_reference_library_writes_is_found(tmp_path: Path) -> None:
    tensors = write(tmp_path / "model.gguf")
    file = read_gguf(tmp_path / "model.gguf")
    assert file.keys["general.architecture"] == "qwen3moe"
    assert file.keys["qwen3moe.block_count"] == 3
    assert file.keys["tokenizer.ggml.tokens"] == ["a", "b", "<end>"]
    assert file.keys["tokenizer.ggml.token_type"] == [1, 1, 3]
    assert file.keys["qwen3moe.expert_weights_norm"] is True
    content = (tmp_path / "model.gguf").read_bytes()
    for name, values in tensors.items():
        entry = file.tensors[name]
        assert entry.shape == (4, 32) and entry.dtype == "F32"
        assert content[entry.start : entry.stop] == values.tobytes()
    assert file.tensors["token_embd.weight"].dtype == "Q8_0"
    assert file.tensors["token_embd.weight"].shape == (3, 64)


def test_the_table_of_blocks_is_the_reference_library_s() -> None:
    for name, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


def test_a_split_model_is_found_from_any_of_its_files(tmp_path: Path) -> None:
    tensors = write(tmp_path / "model.gguf", split=2)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 1
    for part in parts:
        files = read_gguf_model(part)
        assert [file.path for file in files] == parts
        assert set(tensors) < {name for file in files for name in file.tensors}
        assert files[0].keys["qwen3moe.block_count"] == 3


def test_a_split_model_with_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split=2)
    first, second = sorted(tmp_path.iterdir())
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00002.gguf: key 'split.no' is 0; expected 1"):
        read_gguf_model(first)
    second.write_bytes(content.replace(b"blk.2.attn_q", b"blk.0.attn_q"))
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.attn_q.weight' is in .*00001-of-00002.gguf too"):
        read_gguf_model(first)
    second.unlink()
    with pytest.raises(NotFoundError, match=r"1 of 2 files are missing: model-00002-of-00002.gguf"):
        read_gguf_model(first)
    renamed = first.rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="is one of 2 files, but its name does not end"):
        read_gguf_model(renamed)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def file_of(
    *tensors: bytes,
    keys: tuple[bytes, ...] = (),
    data: int = 128,
    claims: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """`claims`: numbers of tensors and keys, instead of the true ones."""
    head = struct.pack("<4sIQQ", b"GGUF", version, *(claims or (len(tensors), len(keys))))
    content = head + b"".join(keys) + b"".join(tensors)
    return content + b"\0" * (-len(content) % alignment) + b"\0" * data


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_in_memory_keeps_its_rules(version: int) -> None:
    keys = (
        key(b"text", 8, text(b"abc")),
        key(b"number", 6, struct.pack("<f", 1.5)),
        key(b"words", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"bc")),
        key(b"numbers", 9, struct.pack("<IQ2H", 2, 2, 7, 8)),
        key(b"general.alignment", 4, struct.pack("<I", 64)),
    )
    tensors = tensor(b"x", (4, 2)), tensor(b"y", (3,), kind=30, offset=64)
    content = file_of(*tensors, keys=keys, data=128, version=version, alignment=64)
    start = len(content) - 128
    found = parse_gguf(content, Path("f"), ADAPTER)
    assert found.keys == {
        "text": "abc",
        "number": 1.5,
        "words": ["a", "bc"],
        "numbers": [7, 8],
        "general.alignment": 64,
    }
    assert found.tensors == {
        "x": Entry("F32", (2, 4), start, start + 32),
        "y": Entry("BF16", (3,), start + 64, start + 70),
    }


HUGE = 1 << 60
LIES: dict[str, tuple[bytes, str]] = {
    "another format": (b"GGML" + b"\0" * 60, "no GGUF file: begins with b'GGML'"),
    "nothing": (b"", "truncated in the header: the magic number"),
    "big endian": (b"GGUF\0\0\0\3" + b"\0" * 60, "is big-endian"),
    "version 1": (file_of(version=1), "is version 1"),
    "version 9": (file_of(version=9), "is version 9"),
    "number of tensors": (file_of(tensor(), claims=(HUGE, 0)), "the number of tensors: claims"),
    "number of keys": (file_of(tensor(), claims=(1, 1 << 40)), "the number of keys: claims"),
    "the name of a key": (file_of(keys=(struct.pack("<Q", HUGE),)), "the name of a key: claims a text of"),
    "an array": (
        file_of(keys=(key(b"k", 9, struct.pack("<IQ", 4, 1 << 59)),)),
        "key 'k': claims 576460752303423488 items",
    ),
    "an array of texts": (file_of(keys=(key(b"k", 9, struct.pack("<IQ", 8, 1 << 40)),)), "key 'k': claims"),
    "a text": (file_of(keys=(key(b"k", 8, struct.pack("<Q", 1 << 50)),)), "key 'k': claims a text of"),
    "a type of a key": (file_of(keys=(key(b"k", 77, b""),)), "key 'k' has type 77"),
    "a nested array": (file_of(keys=(key(b"k", 9, struct.pack("<IQ", 9, 1)),)), "key 'k' has type 9"),
    "a key twice": (file_of(keys=(key(b"k", 7, b"\1"),) * 2), "key 'k' appears twice"),
    "a key without UTF-8": (file_of(keys=(key(b"\xff", 7, b"\1"),)), "the name of a key: not UTF-8"),
    "no UTF-8": (file_of(tensor(b"\xff")), "the name of a tensor: not UTF-8"),
    "a name twice": (file_of(tensor(), tensor(offset=128), data=256), "tensor 't' appears twice"),
    "dimensions": (file_of(tensor(dims=(1,) * 9)), "tensor 't' has 9 dimensions; expected 1 to 4"),
    "no weights": (file_of(tensor(dims=(32, 0))), r"tensor 't' has shape \[0, 32\]"),
    "no weights of many": (file_of(tensor(dims=(0, 1 << 63))), r"tensor 't' has shape \[\d+, 0\]"),
    "too many weights": (file_of(tensor(dims=(1 << 40, 1 << 40))), "expected 1 to 2\\^60 weights"),
    "far too many weights": (file_of(tensor(dims=(HUGE,) * 4)), "expected 1 to 2\\^60 weights"),
    "a type": (file_of(tensor(kind=5)), "tensor 't' has type 5"),
    "an offset": (file_of(tensor(offset=64)), "tensor 't' has offset 64; expected 0"),
    "an overlap": (file_of(tensor(), tensor(b"u", offset=64), data=256), "'u' has offset 64; expected 128"),
    "a gap": (file_of(tensor(), tensor(b"u", offset=160), data=512), "'u' has offset 160; expected 128"),
    "too long": (file_of(tensor(), data=127), "lying sizes: tensor 't' ends at byte"),
    "alignment": (
        file_of(tensor(), keys=(key(b"general.alignment", 4, struct.pack("<I", 48)),)),
        "'general.alignment' is 48; expected a power of two",
    ),
}
OF_MODELS = {
    "half a block": (file_of(tensor(dims=(40,), kind=8)), "rows of 40; expected a multiple of 32 for Q8_0"),
    "a type with a name": (file_of(tensor(kind=28)), "tensor 't' has type F64; expected F32, F16, Q4_0, "),
}
OF_ADAPTERS = {
    "a model's type": (file_of(tensor(kind=8)), "tensor 't' has type Q8_0; expected F32, F16, BF16: convert"),
    "alignment below 8": (
        file_of(tensor(), keys=(key(b"general.alignment", 4, struct.pack("<I", 4)),)),
        "'general.alignment' is 4; expected a power of two from 8 to 65536",
    ),
    "more bytes": (file_of(tensor(), data=192), "64 bytes after the last tensor belong to no tensor"),
    "only bytes": (file_of(data=20 << 20), "20971520 bytes after the last tensor belong to no tensor"),
    "a header above its limit": (
        file_of(keys=(key(b"k", 9, struct.pack("<IQ", 10, 17 << 17) + bytes(17 << 20)),)),
        "key 'k' ends at byte .*, a header of at most 16777216 is accepted",
    ),
}


@pytest.mark.parametrize("content, message", (LIES | OF_MODELS).values(), ids=list(LIES | OF_MODELS))
def test_a_lying_header_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_gguf(path)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize("content, message", (LIES | OF_ADAPTERS).values(), ids=list(LIES | OF_ADAPTERS))
def test_a_lying_adapter_in_memory_is_refused_at_once(content: bytes, message: str) -> None:
    seconds = []
    for _ in range(3):  # the least: a collection of garbage takes longer
        started = time.process_time()
        with pytest.raises(AdapterError, match=f"^f: .*{message}"):
            parse_gguf(content, Path("f"), ADAPTER)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.0004  # 0.04 ms measured


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_STRING_BYTES", 20, r"claims a text of \d+ bytes; at most 20 are accepted"),
        ("MODEL", replace(MODEL, header_bytes=100), "a header of at most 100 is accepted"),
    ],
)
def test_limits_hold_for_bytes_that_are_read_already(
    written: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(gguf_file, limit, value)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(written)


def test_every_truncation_is_refused(written: Path, tmp_path: Path) -> None:
    content, path = written.read_bytes(), tmp_path / "cut.gguf"
    last = max(entry.stop for entry in read_gguf(written).tensors.values())
    for length in range(0, last, 7):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


NUMBERS = st.sampled_from([0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) + 1, (1 << 64) - 1])


@settings(max_examples=examples(400), deadline=None, derandomize=EACH_RUN_ALIKE)
@given(data=st.data())
def test_fuzz_changed_bytes_are_read_or_refused_within_bounds(written: Path, data: Any) -> None:
    """Numbers anywhere in the header are replaced, and bytes flipped: a header is accepted with tensors that lie in the
    file, or refused with an error of ours."""
    content = bytearray(written.read_bytes())
    header = min(entry.start for entry in read_gguf(written).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header - 9))
        if data.draw(st.booleans()):
            content[at : at + 8] = data.draw(NUMBERS).to_bytes(8, "little")
        else:
            content[at] ^= data.draw(st.integers(1, 255))
    path = written.with_name("changed.gguf")
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except KtError as error:
        assert isinstance(error, CheckpointError) and str(path) in str(error)
    else:
        assert all(0 < entry.start < entry.stop <= len(content) for entry in file.tensors.values())
