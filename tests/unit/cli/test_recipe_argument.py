"""FILE and KEY=VALUE on the command line, for every command that takes a recipe."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kt_runtime.cli.main import main
from kt_runtime.cli.recipe_argument import find_recipe, recipe_of


@pytest.mark.parametrize(
    ("option", "arguments", "file", "overrides"),
    [
        (None, ["r.yaml"], "r.yaml", ()),
        (None, ["r.yaml", "lora_rank=16", "a.b=1"], "r.yaml", ("lora_rank=16", "a.b=1")),
        (None, ["lora_rank=16", "r.yaml"], "r.yaml", ("lora_rank=16",)),
        ("r.yaml", ["dataset=a=b"], "r.yaml", ("dataset=a=b",)),
        (None, ["here=1.yaml", "x=2"], "here=1.yaml", ("x=2",)),  # a file that is there
    ],
)
def test_the_file_is_told_from_what_overrides_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    arguments: list[str],
    file: str,
    overrides: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here=1.yaml").write_text("")
    assert recipe_of(Path(option) if option else None, arguments, "train") == (Path(file), overrides)


@pytest.mark.parametrize(
    ("option", "arguments", "message"),
    [
        ("a.yaml", ["b.yaml"], "'b.yaml' is not of the form KEY=VALUE, and the recipe is 'a.yaml' already"),
        (None, ["a.yaml", "lora_rank", "16"], "'lora_rank' is not of the form KEY=VALUE"),
        (None, ["lora_rank=8"], r"name a recipe: kt-runtime train FILE .*'lora_rank=8' changes a recipe's key"),
        (None, [], "name a recipe: kt-runtime train FILE"),
    ],
)
def test_two_files_and_none_are_refused(option: str | None, arguments: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        recipe_of(Path(option) if option else None, arguments, "train")


def test_chat_needs_no_recipe() -> None:
    assert find_recipe(None, []) == (None, ())


@pytest.mark.parametrize("command", ["train", "predict", "chat", "export"])
def test_every_command_reads_the_file_that_is_named_without_an_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: nobody\nlora_rnk: 8\n")
    assert main([command, str(recipe), "lora_dropout=2"]) == 2
    said = capsys.readouterr().err
    assert f"{recipe}:2: lora_rnk: 8: no such key; did you mean lora_rank?" in said
    assert "command line: lora_dropout: " in said
