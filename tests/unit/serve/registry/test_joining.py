"""`--registry`, before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.registry import Registry, open_place
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.serve.registry.joining import Joining, joining

CONFIG = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "rope_theta": 1.0}
Join = Callable[..., Joining | None]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def join(tmp_path: Path, said: list[str]) -> Join:
    adapters = tmp_path / "adapters"
    adapters.mkdir()

    def call(registry: str | None, **config: object) -> Joining | None:
        options = ServeOptions(model="tiny-qwen3-moe", registry=registry)
        return joining(options, "tiny-qwen3-moe", CONFIG | config, adapters, said.append)

    return call


def test_without_the_option_there_is_no_registry(join: Join, tmp_path: Path) -> None:
    assert join(None) is None and not list((tmp_path / "adapters").iterdir())


def test_the_directory_is_made_but_not_its_parents(join: Join, tmp_path: Path) -> None:
    joined = join(str(tmp_path / "registry"))
    assert joined is not None and (tmp_path / "registry").is_dir() and not list((tmp_path / "registry").iterdir())
    assert joined.about.shape == {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    with pytest.raises(InvalidValueError, match=r"--registry .*no/such/registry: No such file or directory"):
        join(str(tmp_path / "no" / "such" / "registry"))


def test_what_is_no_registry_is_refused_with_its_value(join: Join, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"--registry .*/file: is not a directory"):
        join(str(tmp_path / "file"))
    with pytest.raises(InvalidValueError, match="memory://x: is memory of one process"):
        join("memory://x")
    with pytest.raises(UnknownNameError, match="unknown scheme 's4'; known: file, memory, s3"):
        join("s4://bucket/registry")


def test_a_directory_without_hard_links_is_refused(join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(InvalidValueError, match="no hard links"):
        join(str(tmp_path / "registry"))
    assert not list((tmp_path / "registry").iterdir())


def test_the_registry_of_another_model_is_refused_with_both_values(join: Join, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    place = open_place(str(tmp_path / "registry"), "other")
    Registry(place, "other").join("a" * 64, "another", {"model_type": "qwen3_moe", "hidden_size": 128})
    with pytest.raises(ConflictError, match=r"another model, another; .*hidden_size 128 and 64"):
        join(str(tmp_path / "registry"))
    assert join(str(tmp_path / "registry"), hidden_size=128) is not None


def test_a_base_that_can_not_be_read_is_refused(join: Join, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "base.json").write_text('{"format": 1, "regis')
    with pytest.raises(InvalidValueError, match=r"base\.json: not a base of format 1"):
        join(str(tmp_path / "registry"))


def test_a_registry_that_was_joined_before_and_is_gone_is_a_note(join: Join, tmp_path: Path, said: list[str]) -> None:
    joined = join(str(tmp_path / "registry"))
    assert joined is not None
    joined.file.write(type(joined.state)(replica=joined.state.replica, registry="0" * 32))
    (tmp_path / "registry").rmdir()
    again = join(str(tmp_path / "registry"))
    assert again is not None and again.state.replica == joined.state.replica
    assert any("does not answer, and is joined when it does" in line for line in said)
    assert not (tmp_path / "registry").exists()
