"""Whether the recipe's model is the resident one, and what a server that is not there means."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from kt_runtime.cli.train.run_server import check_model, running_server, same_checkpoint
from kt_runtime.errors import ConflictError, ServerUnreachableError
from kt_runtime.serve.models.make_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "one"
    make_model("tiny-qwen3-moe", directory, seed=1)
    return directory


def test_the_same_model_is_known_by_name_path_link_and_content(model: Path, tmp_path: Path) -> None:
    status = {"model": "one", "model_directory": str(model)}
    (tmp_path / "link").symlink_to(model)
    shutil.copytree(model, tmp_path / "copy")
    for wanted in ("one", str(model), f"{model}/", str(tmp_path / "link"), str(tmp_path / "copy")):
        assert check_model(wanted, status) == model


def test_a_model_with_other_weights_is_refused_with_both_names(model: Path, tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "tuned", seed=2)
    assert (tmp_path / "tuned" / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert not same_checkpoint(model, tmp_path / "tuned")
    with pytest.raises(ConflictError, match=rf"model_name_or_path: .*tuned.* resident model is one \({model}\)"):
        check_model(str(tmp_path / "tuned"), {"model": "one", "model_directory": str(model)})


def test_a_broken_directory_is_another_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert not same_checkpoint(model, tmp_path)


def test_a_server_named_on_the_command_line_must_be_there() -> None:
    with (
        pytest.raises(ServerUnreachableError, match="no server answers there"),
        running_server("tiny-qwen3-moe", "http://127.0.0.1:9", None, lambda _: None),
    ):
        raise AssertionError("nothing may start")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_of_pipes_is_another_model_at_once(model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    os.mkfifo(tmp_path / "m" / name)
    found: list[bool] = []
    reader = threading.Thread(target=lambda: found.append(same_checkpoint(model, tmp_path / "m")), daemon=True)
    reader.start()
    reader.join(30)  # one that waits for the pipe must not hang the tests
    assert found == [False]
