"""A job's recipe is one that `kt-runtime train` accepts, without a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.adapters.paths import check_adapter_name
from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.finetuning.files import new_id
from kt_runtime.serve.finetuning.jobs import JobRecord
from kt_runtime.serve.finetuning.recipe import ServerFacts, WrongFile, checkpoint_name, prepare, result_name
from kt_runtime.train.recipe import Recipe, read_recipe

TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
PAIR = {
    "input": {"messages": TALK["messages"][:1]},
    "preferred_output": TALK["messages"][1:],
    "non_preferred_output": [{"role": "assistant", "content": "b"}],
}
TASK = {"messages": TALK["messages"][:1], "x": "y"}
ROWS = {"supervised": TALK, "dpo": PAIR, "reinforcement": TASK}
GRADER = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.x}}", "operation": "eq"}


def prepared(
    place: Path, method: Any, *, num_rows: int = 20, start: Path | None = None, **hyperparameters: Any
) -> tuple[Recipe, dict[str, Any]]:
    path = place / "rows.jsonl"
    path.write_text((json.dumps(ROWS[method]) + "\n") * num_rows)
    job = JobRecord(
        id=new_id("ftjob-"),
        sequence=1,
        model="tiny",
        start=None if start is None else "mine",
        result="ft.tiny.abc",
        method=method,
        hyperparameters=hyperparameters,
        grader=GRADER if method == "reinforcement" else None,
        training_file="file-1",
        validation_file="file-2",
        suffix=None,
        seed=7,
        metadata={},
        created_at=0,
    )
    facts = ServerFacts(Path("/models/tiny"), 8, 512)
    files = {"training_file": path, "validation_file": path}
    (place / "job").mkdir(exist_ok=True)
    decided = prepare(job, place / "job", place / "runs" / job.id, files, start, facts)
    recipe, notes = read_recipe(place / "job" / "recipe.json")
    assert notes == []
    return recipe, decided


def test_what_is_left_to_the_server_is_decided(tmp_path: Path) -> None:
    recipe, decided = prepared(tmp_path, "supervised")
    assert decided == {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 1.0}
    assert (recipe.stage, recipe.num_train_epochs, recipe.rows_per_step) == ("sft", 3, 8)
    assert (recipe.learning_rate, recipe.lora_rank, recipe.seed, recipe.cutoff_len) == (2e-4, 8, 7, 512)
    assert (recipe.publish, recipe.eval_dataset, recipe.save_steps, recipe.save_total_limit) == (
        "ft.tiny.abc",
        ("valid",),
        0.1,
        3,
    )


def test_hyperparameters_become_keys(tmp_path: Path) -> None:
    recipe, _ = prepared(tmp_path, "dpo", n_epochs=2, batch_size=15, learning_rate_multiplier=2.0, beta=0.3)
    assert (recipe.stage, recipe.num_train_epochs, recipe.pref_beta, recipe.learning_rate) == ("dpo", 2, 0.3, 4e-5)
    assert (recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps) == (5, 3)
    recipe, decided = prepared(
        tmp_path, "reinforcement", compute_multiplier=0.5, eval_interval=4, max_completion_tokens=12, batch_size=2
    )
    assert (recipe.stage, recipe.reward, recipe.num_generations, recipe.rollout_batch_size) == (
        "grpo",
        "exact_match",
        4,
        2,
    )
    assert (recipe.max_new_tokens, recipe.cutoff_len, recipe.eval_steps) == (12, 500, 4)
    assert decided["max_completion_tokens"] == 12


def test_training_continues_from_a_copy_of_an_adapter(tmp_path: Path) -> None:
    start = tmp_path / "version"
    start.mkdir()
    with pytest.raises(InvalidValueError, match="not on the server's disk"):
        prepared(tmp_path, "supervised", start=start)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (start / name).write_text(name)
    recipe, _ = prepared(tmp_path, "supervised", start=start)
    assert recipe.adapter_name_or_path == tmp_path / "job" / "start" and "lora_rank" not in recipe.places
    assert (tmp_path / "job" / "start" / "adapter_config.json").read_text() == "adapter_config.json"


def test_what_the_rows_do_not_allow_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(WrongFile, match="the file has only 3 rows"):
        prepared(tmp_path, "supervised", num_rows=3, batch_size=4)
    with pytest.raises(InvalidValueError, match="max_completion_tokens 512: this server's context leaves at most 511"):
        prepared(tmp_path, "reinforcement", max_completion_tokens=512)


@pytest.mark.parametrize(
    ("base", "suffix", "name"),
    [
        ("tiny", None, "ft.tiny.12345678"),
        ("org/Model 1.5:x", "My helper!", "ft.Model-1-5-x.My-helper.12345678"),
        ("é" * 300, "é", "ft.model.model.12345678"),
        ("b" * 300, "s" * 64, f"ft.{'b' * 24}.{'s' * 64}.12345678"),
    ],
)
def test_a_result_has_a_name_that_an_adapter_may_have(base: str, suffix: str | None, name: str) -> None:
    made = result_name(base, suffix, "12345678")
    assert made == name.replace("Model-1-5-x", "org-Model-1-5-x")
    check_adapter_name(checkpoint_name(made, 1_000_000))
