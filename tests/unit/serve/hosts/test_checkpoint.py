"""The fingerprint of a checkpoint's files: which changes it sees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.hosts.checkpoint import SAMPLE_BYTES, SAMPLES, sampled_fingerprint

SIZE = 40 * SAMPLE_BYTES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": 64}))
    header = json.dumps({"a": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}).encode()
    (directory / "model-1.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(SIZE))
    return directory


def changed(checkpoint: Path, name: str, at: int, value: bytes) -> Path:
    with (checkpoint / name).open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        file.write(value)
    return checkpoint


def test_a_copy_has_the_same_and_so_has_a_config_with_other_spaces(checkpoint: Path, tmp_path: Path) -> None:
    before = sampled_fingerprint(checkpoint)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "config.json").write_text('{"hidden_size":64,  "model_type":"qwen3_moe"}')
    (copy / "README.md").write_text("another text")
    assert sampled_fingerprint(copy) == before and len(before) == 64


@pytest.mark.parametrize(("at", "name"), [(20, "the header"), (-1, "the end"), (SIZE // (SAMPLES - 1) + 200, "within")])
def test_a_byte_in_a_sample_changes_it(checkpoint: Path, at: int, name: str) -> None:
    before = sampled_fingerprint(checkpoint)
    assert sampled_fingerprint(changed(checkpoint, "model-1.safetensors", at, b"\x01")) != before, name


def test_a_file_that_is_cut_off_renamed_added_or_of_another_config_changes_it(checkpoint: Path) -> None:
    seen = {sampled_fingerprint(checkpoint)}
    weights = checkpoint / "model-1.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    seen.add(sampled_fingerprint(checkpoint))
    weights = weights.rename(checkpoint / "model-2.safetensors")
    seen.add(sampled_fingerprint(checkpoint))
    shutil.copy(weights, checkpoint / "model-3.safetensors")
    seen.add(sampled_fingerprint(checkpoint))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": 65}))
    seen.add(sampled_fingerprint(checkpoint))
    assert len(seen) == 5


def test_a_file_that_can_not_be_read_is_named(checkpoint: Path) -> None:
    (checkpoint / "model-9.safetensors").mkdir()
    with pytest.raises(InvalidValueError, match=r"model-9\.safetensors: can't be read"):
        sampled_fingerprint(checkpoint)
