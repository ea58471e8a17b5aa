"""What is loaded on several hosts goes through the directory that all see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kt_runtime.errors import AdapterError, InvalidValueError
from kt_runtime.serve.hosts.shared_copy import shared_copy


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    (place := tmp_path / "adapters").mkdir()
    return place


def test_the_files_are_there_for_as_long_as_the_block_runs(tmp_path: Path, adapters: Path) -> None:
    (source := tmp_path / "a").mkdir()
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(b"12345")
    (source / "events.log").write_text("left out")
    (source / "checkpoint-1").mkdir()

    async def work() -> None:
        async with shared_copy(str(source), adapters) as path:
            assert Path(path).parent == adapters and Path(path).name.startswith(".tmp-")
            assert sorted(each.name for each in Path(path).iterdir()) == [
                "adapter_config.json",
                "adapter_model.safetensors",
            ]

    asyncio.run(work())
    assert not list(adapters.iterdir()) and source.exists()


def test_a_gguf_file_keeps_its_ending(tmp_path: Path, adapters: Path) -> None:
    (source := tmp_path / "a.gguf").write_bytes(b"GGUF")

    async def work() -> None:
        async with shared_copy(str(source), adapters) as path:
            assert path.endswith(".gguf") and Path(path).read_bytes() == b"GGUF"

    asyncio.run(work())
    assert not list(adapters.iterdir())


def test_errors_name_the_path_that_the_client_gave(tmp_path: Path, adapters: Path) -> None:
    (source := tmp_path / "a").mkdir()

    async def work() -> None:
        async with shared_copy(str(source), adapters) as path:
            raise AdapterError(f"{path}: adapter_config.json is missing")

    with pytest.raises(AdapterError) as failed:
        asyncio.run(work())
    assert str(failed.value) == f"{source}: adapter_config.json is missing" and not list(adapters.iterdir())


def test_a_path_without_an_adapter_is_left_to_whoever_reads_it(tmp_path: Path, adapters: Path) -> None:
    async def work(path: str) -> str:
        async with shared_copy(path, adapters) as found:
            return found

    assert asyncio.run(work(str(tmp_path / "nothing"))) == str(tmp_path / "nothing")
    adapters.chmod(0o500)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "adapter_config.json").mkdir()
    adapters.rmdir()
    with pytest.raises(InvalidValueError, match="full: can't be copied to --adapter-dir: No such file"):
        asyncio.run(work(str(tmp_path / "full")))
