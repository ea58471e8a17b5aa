"""What `kt-runtime predict` says before it needs a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.cli.train.predict import _adapter_directory
from kt_runtime.cli.train.temporary_adapter import rank_of

RECIPE = "model_name_or_path: tiny-qwen3-moe\neval_dataset: rows\ndataset_dir: .\n"


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (RECIPE, (), "output_dir is missing"),
        (RECIPE, ("output_dir=out", "adapter_name_or_path=nowhere"), "nowhere: no such file or directory"),
        (RECIPE, ("output_dir=out",), "kt-runtime models make"),
        (RECIPE, ("output_dir=out", "--url", "http://127.0.0.1:9"), "tiny-qwen3-moe"),
        (RECIPE.replace("eval_dataset", "eval_datset"), ("output_dir=out",), "recipe.yaml:2: eval_datset"),
    ],
)
def test_a_mistake_is_one_message(
    run: Callable[..., Any], tmp_path: Path, recipe: str, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe)
    ran = run("predict", "--recipe", "recipe.yaml", *arguments)
    assert ran.returncode == 2, ran.stderr
    assert message in ran.stderr and "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()


def test_the_trained_adapter_goes_before_the_one_that_training_began_with(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(do_train=True, output_dir=tmp_path, adapter_name_or_path=Path("first"))
    assert _adapter_directory(recipe) == Path("first")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 12}))
    assert _adapter_directory(recipe) == tmp_path
    assert rank_of(tmp_path) == 12
    recipe.do_train = False
    assert _adapter_directory(recipe) == Path("first")


def test_a_broken_configuration_has_no_rank(tmp_path: Path) -> None:
    assert rank_of(None) == rank_of(tmp_path) == 0
    (tmp_path / "adapter_config.json").write_text("[]")
    assert rank_of(tmp_path) == 0
