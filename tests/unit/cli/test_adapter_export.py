"""`kt-runtime adapter export` of adapters on disk; names of a server are in tests/system/adapters/test_exports.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import lora

from kt_runtime.adapters import AdapterTensors, content_hash, read_adapter, write_peft_directory
from kt_runtime.cli.adapter.export_record import RECORD_FILE, record_of
from kt_runtime.cli.main import main
from kt_runtime.families import family_for
from kt_runtime.serve.models.make_model import make_model

Call = Callable[..., tuple[int, str, str]]
PRESET = "tiny-deepseek-v3"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(PRESET, tmp_path_factory.mktemp("models") / PRESET, seed=4)


@pytest.fixture
def config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def write(path: Path, config: dict[str, Any], *only: str, base: str | None = PRESET) -> tuple[Path, AdapterTensors]:
    adapter = lora.random_adapter(config, rank=4, alpha=8.0, seed=3, only=only)
    write_peft_directory(path, adapter, family_for(config), config, max_rank=4, base_model=base)
    return path, adapter


@pytest.fixture
def call(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in this process, which has imported torch already: (exit status, stdout, stderr)."""
    monkeypatch.setenv("KT_RUNTIME_MODELS", str(model.parent))
    monkeypatch.setenv("KT_RUNTIME_URL", "http://127.0.0.1:9")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        status = main(["adapter", "export", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def exported(call: Call, *arguments: str | Path) -> dict[str, Any]:
    status, out, err = call(*arguments, "--json")
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def refused(call: Call, *arguments: str | Path) -> str:
    status, _, err = call(*arguments)
    assert status == 2 and "Traceback" not in err
    return err


def test_from_peft_to_gguf_and_back_the_tensors_stay_the_same(
    call: Call, config: dict[str, Any], tmp_path: Path
) -> None:
    path, adapter = write(tmp_path / "a", config, "q_a_proj", "kv_a_proj_with_mqa", "o_proj", "shared", "experts")
    answer = exported(call, path, tmp_path / "a.gguf", "--format", "gguf")
    assert answer["path"] == str(tmp_path / "a.gguf")
    (note,) = answer["notes"]
    assert "llama.cpp reads the parts for kv_a_proj_with_mqa, q_a_proj" in note
    answer = exported(call, tmp_path / "a.gguf", tmp_path / "b", "--base", PRESET)
    total = sum(tensor.numel() for tensor in adapter.tensors.values())
    assert f"PEFT 0.21 with transformers 5 (PeftModel.from_pretrained): all {total:,} parameters" in answer["notes"]
    unused = sum(pair.a.numel() + pair.b.numel() for name, pair in adapter.modules.items() if "_a_proj" in name)
    assert any(
        f"{total - unused:,} of {total:,} parameters; it loads kv_a_proj_with_mqa, q_a_proj and does not use" in note
        for note in answer["notes"]
    )
    again = read_adapter(tmp_path / "b", family_for(config), config, 4)
    assert content_hash(again) == content_hash(adapter)
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["base_model_name_or_path"] == PRESET


def test_a_dtype_is_that_of_the_files(call: Call, config: dict[str, Any], tmp_path: Path) -> None:
    path, adapter = write(tmp_path / "a", config, "o_proj")
    exported(call, path, tmp_path / "b", "--dtype", "bfloat16")
    exported(call, path, tmp_path / "b.gguf", "--format", "gguf", "--dtype", "float16")
    for place, dtype in ((tmp_path / "b", torch.bfloat16), (tmp_path / "b.gguf", torch.float16)):
        found = read_adapter(place, family_for(config), config, 4).tensors
        assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in adapter.tensors.items())


def test_merged_is_a_checkpoint_and_nothing_overwrites(call: Call, config: dict[str, Any], tmp_path: Path) -> None:
    path, _ = write(tmp_path / "a", config)
    arguments = (path, tmp_path / "m", "--format", "merged", "--shard-size", "0.001")
    answer = exported(call, *arguments)
    assert answer["notes"][-1].startswith(f"merged into {PRESET}: ")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
    assert f"{tmp_path / 'm'} exists already; choose another name, or pass --overwrite" in refused(call, *arguments)


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_the_base_model_is_never_overwritten(
    call: Call, model: Path, config: dict[str, Any], tmp_path: Path, form: str
) -> None:
    path, _ = write(tmp_path / "a", config, "o_proj")
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    arguments = (path, model, "--format", form, "--overwrite")
    assert "replaces only what an export wrote" in refused(call, *arguments)
    record = model / RECORD_FILE  # a base that was merged before
    record.write_bytes(record_of(before))
    try:
        assert "is the base model itself" in refused(call, *arguments)
    finally:
        record.unlink()
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


@pytest.mark.parametrize(("form", "name"), [("peft", "out"), ("gguf", "out.gguf"), ("merged", "out")])
def test_overwrite_replaces_an_export_and_nothing_else(
    call: Call, config: dict[str, Any], tmp_path: Path, form: str, name: str
) -> None:
    path, _ = write(tmp_path / "a", config, "o_proj")
    out = tmp_path / name
    exported(call, path, out, "--format", form)
    marker = out / "adapter_config.json" if form == "peft" else out / "config.json" if form == "merged" else out
    before = marker.stat().st_ino
    assert "pass --overwrite" in refused(call, path, out, "--format", form)
    exported(call, path, out, "--format", form, "--overwrite")
    assert marker.stat().st_ino != before
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")
    assert "it has no kt_export.json" in refused(call, path, kept, "--format", form, "--overwrite")
    (kept / "config.json").write_text("{}")
    (kept / "chapters").mkdir()
    assert "it has no kt_export.json" in refused(call, path, kept, "--format", form, "--overwrite")
    assert (kept / "thesis.txt").read_text() == "years of work"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted({"a", name, "kept"})


@pytest.mark.parametrize("form", ["peft", "merged", "gguf"])
def test_checkpoints_and_adapters_of_other_programs_are_never_overwritten(
    call: Call, model: Path, config: dict[str, Any], tmp_path: Path, form: str
) -> None:
    """Any flat directory with a config.json was: another model's weights, or somebody's adapter."""
    path, _ = write(tmp_path / "a", config, "o_proj")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    theirs = tmp_path / "theirs.gguf"
    theirs.write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 16)
    for there in (other, path, theirs):
        assert "replaces only what an export wrote" in refused(call, path, there, "--format", form, "--overwrite")
    assert sorted(file.name for file in other.iterdir()) == sorted(file.name for file in model.iterdir())
    assert theirs.read_bytes().startswith(b"GGUF")


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_what_was_added_to_an_export_is_not_lost(call: Call, config: dict[str, Any], tmp_path: Path, form: str) -> None:
    path, _ = write(tmp_path / "a", config, "o_proj")
    out = tmp_path / "out"
    exported(call, path, out, "--format", form)
    (out / "notes.txt").write_text("mine")
    assert "it holds 'notes.txt'" in refused(call, path, out, "--format", form, "--overwrite")
    (out / "notes.txt").unlink()
    exported(call, path, out, "--format", form, "--overwrite")
    (out / "kt_export.json").write_text('{"files": 5}')
    assert "kt_export.json: " in refused(call, path, out, "--format", form, "--overwrite")


def test_what_cannot_be_exported_is_refused_with_what_to_do(call: Call, config: dict[str, Any], tmp_path: Path) -> None:
    path, _ = write(tmp_path / "a", config, base=None)
    out = tmp_path / "out"
    base = ("--base", PRESET)
    assert "kv_b_proj" in refused(call, path, out, *base, "--format", "gguf")
    assert "no base_model_name_or_path; name the model that it belongs to with --base" in refused(call, path, out)
    assert "model 'tiny-deepsek' is not on this machine" in refused(call, path, out, "--base", "tiny-deepsek")
    assert "only served names have versions" in refused(call, path, out, *base, "--version", "ab")
    assert "float16: a merged checkpoint is" in refused(
        call, path, out, *base, "--format", "merged", "--dtype", "float16"
    )
    assert "expected more than 0" in refused(call, path, out, *base, "--format", "merged", "--shard-size", "0")
    assert "'nobody' is no adapter's path here, and as a name it needs a server" in refused(call, "nobody", out)
    assert "no such adapter" in refused(call, tmp_path / "nothing.gguf", out)
    (tmp_path / "empty.gguf").touch()
    assert "truncated" in refused(call, tmp_path / "empty.gguf", out, *base)
    assert not out.exists()
