"""The directory of files and jobs: private, locked, switched off."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.serve.finetuning.directory import claimed_finetuning


def test_the_default_is_in_the_adapter_directory_and_private(tmp_path: Path) -> None:
    with claimed_finetuning(None, tmp_path, pytest.fail) as place:
        assert place == tmp_path / ".finetuning"
        for path in (place, *place.iterdir()):
            assert path.stat().st_mode & 0o077 == 0, path


def test_another_place_may_be_named_and_off_has_none(tmp_path: Path) -> None:
    with claimed_finetuning(str(tmp_path / "a" / "b"), tmp_path / "adapters", pytest.fail) as place:
        assert place == tmp_path / "a" / "b" and place.is_dir()
    with claimed_finetuning("off", tmp_path / "adapters", pytest.fail) as place:
        assert place is None
    assert not (tmp_path / "adapters").exists()


def test_two_servers_can_not_have_one_directory(tmp_path: Path) -> None:
    with (
        claimed_finetuning(None, tmp_path, pytest.fail),
        pytest.raises(ConflictError, match="name another one"),
        claimed_finetuning(None, tmp_path, pytest.fail),
    ):
        pytest.fail("both have it")


def test_a_place_that_can_not_be_written_is_an_error_if_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"--finetuning-dir .*file"):
        claimed_finetuning(str(tmp_path / "file"), tmp_path, pytest.fail).__enter__()
    notes: list[str] = []
    with claimed_finetuning(None, tmp_path / "file", notes.append) as place:
        assert place is None
    assert len(notes) == 1 and notes[0].startswith("no fine-tuning API: ")
