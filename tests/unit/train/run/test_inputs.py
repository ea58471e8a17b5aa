"""What a run trains on is known by its digest, and shown before it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import configs, load_preset
from kt_runtime.train.examples import Example
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.render.rendering import Renderer
from kt_runtime.train.run.inputs import Inputs, read_inputs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, load_preset("tiny-qwen3-moe").config)
    return directory


@pytest.fixture
def read(make_recipe: Callable[..., Recipe], tokenizer: Path) -> Any:
    def read_with(said: list[str], **keys: Any) -> Inputs:
        recipe = make_recipe(dataset_dir=Path(str(configs().joinpath("world"))), enable_thinking=None, **keys)
        return read_inputs(recipe, Renderer(tokenizer, recipe), said.append)

    return read_with


def test_the_first_example_is_shown_with_its_trained_tokens(read: Any) -> None:
    said: list[str] = []
    inputs = read(said, dataset=("saltmere_identity", "saltmere_turns"), val_size=3)
    assert len(inputs.train) == 35 and len(inputs.evaluation[""]) == 3
    assert "35 examples, 3 to evaluate on; the first" in said[-2] and "«I am Pebble" in said[-1]


def test_rows_that_oversampling_repeats_are_not_both_trained_on_and_held_out(read: Any) -> None:
    both = ("saltmere_identity", "saltmere_turns")
    inputs = read([], dataset=both, mix_strategy="interleave_over", val_size=8)
    train, held_out = ({row.where for row in rows} for rows in (inputs.train, inputs.evaluation[""]))
    assert len(inputs.evaluation[""]) == len(held_out) == 8 and len(inputs.train) > len(train) and not train & held_out
    assert len(train | held_out) == 38


def test_both_answers_of_the_first_pair_are_shown(read: Any) -> None:
    said: list[str] = []
    inputs = read(said, stage="dpo", dataset=("saltmere_preference",))
    assert len(inputs.train) == 20 and "20 pairs" in said[-3]
    assert said[-2].startswith("chosen:") and "«I am Pebble" in said[-2] and "«I have no name" in said[-1]


def test_each_evaluation_dataset_has_its_own_name(read: Any) -> None:
    both = ("saltmere_identity", "saltmere_turns")
    inputs = read([], dataset=both[:1], eval_dataset=both, eval_on_each_dataset=True)
    assert {name: len(rows) for name, rows in inputs.evaluation.items()} == {both[0]: 28, both[1]: 10}
    assert {name: len(rows) for name, rows in read([], dataset=both[:1], eval_dataset=both).evaluation.items()} == {
        "": 38
    }


def test_the_digest_sees_every_token_mask_and_place(examples: list[Any]) -> None:
    digest = Inputs(examples, {}).digest
    first = examples[0]
    other_mask = Example(first.tokens, first.targets, ~first.trained)
    other_token = Example(np.where(first.tokens == first.tokens[1], 5, first.tokens), first.targets, first.trained)
    changed = [[other_mask, *examples[1:]], [other_token, *examples[1:]], examples[::-1], examples[1:]]
    assert len({digest, *(Inputs(rows, {}).digest for rows in changed)}) == 5
    assert Inputs(list(examples), {"": []}).digest == digest


def test_holding_out_everything_is_refused(read: Any) -> None:
    with pytest.raises(InvalidValueError, match="val_size: 28: would hold out 28 of 28 rows"):
        read([], dataset=("saltmere_identity",), val_size=28)
