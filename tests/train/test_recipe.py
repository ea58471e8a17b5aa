"""Recipes: everything wrong is reported at once with its place; nothing is silently ignored or misread."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.train.recipe import Recipe, read_recipe

GOOD = "model_name_or_path: tiny-qwen3-moe\ndataset: identity\noutput_dir: out\n"


def read(tmp_path: Path, text: str | bytes, *overrides: str) -> tuple[Recipe, list[str]]:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_recipe(path, list(overrides))


def test_defaults_are_llama_factorys(tmp_path: Path) -> None:
    recipe, notes = read(tmp_path, GOOD)
    assert (recipe.lora_rank, recipe.served_alpha, recipe.lora_target, recipe.cutoff_len) == (8, 16.0, ("all",), 2048)
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.max_grad_norm, recipe.seed) == (5e-5, 3.0, 1.0, 42)
    assert notes == []


def test_all_problems_are_reported_at_once_with_file_and_line(tmp_path: Path) -> None:
    text = GOOD + "lora_rnk: 8\nlora_rank: eight\nstage: dpo\nlora_rank: 9\nlora_dropout: 1.5\nmax_steps: true\n"
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path, text, "no-equals-sign", "seed=[1")
    message, path = str(caught.value), tmp_path / "recipe.yaml"
    assert "8 problems" in message
    for expected in (
        f"{path}:4: lora_rnk: 8: not honoured by this version; did you mean lora_rank?",
        f"{path}:5: lora_rank: 'eight': must be a whole number of at least 1",
        f"{path}:6: stage: 'dpo': this version knows only sft",
        f"{path}:7: lora_rank stands at {path}:5 already",
        f"{path}:8: lora_dropout: 1.5: must be a number of at least 0 and below 1",
        f"{path}:9: max_steps: True: must be a whole number of at least -1",
        "'seed=[1': the value is not valid YAML",
        "'no-equals-sign' is not of the form key=value",
    ):
        assert expected in message


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "'1e-4'"])
def test_a_learning_rate_is_read_as_the_number_it_looks_like(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, GOOD + f"learning_rate: {text}\n")[0].learning_rate == 1e-4


@pytest.mark.parametrize("text", ["inf", ".inf", "nan", "-1", "0", "true", "fast"])
def test_a_learning_rate_that_is_no_positive_number_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidValueError, match="learning_rate"):
        read(tmp_path, GOOD + f"learning_rate: {text}\n")


def test_overrides_win_and_are_typed(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, GOOD + "lora_rank: 4\n", "lora_rank=32", "dataset=a,b", "publish=mine")
    assert (recipe.lora_rank, recipe.dataset, recipe.publish) == (32, ("a", "b"), "mine")


def test_rslora_is_folded_into_alpha(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, GOOD + "lora_rank: 16\nlora_alpha: 8\nuse_rslora: true\n")
    assert recipe.served_alpha / 16 == pytest.approx(8 / math.sqrt(16))


def test_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())[0].dataset == ("identity",)


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"recipe.yaml:4: byte 0xe9 is not UTF-8"):
        read(tmp_path, GOOD.encode() + b"publish: caf\xe9\n")


def test_keys_without_effect_are_noted(tmp_path: Path) -> None:
    _, notes = read(tmp_path, GOOD + "use_kt: true\noverwrite_cache: true\n")
    assert len(notes) == 1 and notes[0].endswith("recipe.yaml:4: use_kt: no effect, it always does")


def test_json_is_a_recipe_too(tmp_path: Path) -> None:
    text = '{"model_name_or_path": "m", "dataset": ["a"], "output_dir": "o", "learning_rate": 1e-4}'
    assert read(tmp_path, text)[0].learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("- a\n", "a recipe is a mapping"),
        ("a: [1\nb: 2\n", "not valid YAML"),
        ("a: 1\n", "is missing"),
    ],
)
def test_what_is_no_recipe_says_so(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such recipe"):
        read_recipe(tmp_path / "none.yaml")


def test_yaml_tags_that_would_run_code_are_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = GOOD + f"publish: !!python/object/apply:os.system ['touch {canary}']\n"
    with pytest.raises(InvalidValueError, match="could not determine a constructor"):
        read(tmp_path, text)
    assert not canary.exists()


def test_the_shipped_recipes_are_read_without_a_problem() -> None:
    from importlib.resources import as_file, files

    with as_file(files("kt_runtime").joinpath("configs", "recipes")) as directory:
        paths = sorted(directory.glob("*.yaml"))
        assert paths
        for path in paths:
            read_recipe(path)
