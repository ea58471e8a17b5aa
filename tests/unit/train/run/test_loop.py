"""Runs over a resident that counts: what is sent, saved, resumed, published, and when."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.resident.counting_resident import CountingResident, Lines

from kt_runtime.errors import ConflictError, InvalidValueError, NumericsError, RuntimeFault
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run import training
from kt_runtime.train.run.inputs import Inputs
from kt_runtime.train.run.loop import run


def logged(path: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (path / "trainer_log.jsonl").read_text().splitlines()]
    return [(line["current_steps"], line["loss"]) for line in lines if "loss" in line]


@pytest.fixture
def inputs(examples: list[Example]) -> Inputs:
    return Inputs(examples, {})


def test_a_run_whose_name_is_not_its_own_any_more_trains_on_and_says_so_at_the_end(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs, tmp_path: Path
) -> None:
    def lose(step: int) -> None:
        if step == 5:
            resident.refuses_to_publish = ConflictError("adapter 'tuned' was unloaded")

    resident.on_step = lose
    recipe = make_recipe(save_steps=5, publish="tuned", publish_every_steps=4, publish_take_over=True)
    with pytest.raises(ConflictError, match=r"'tuned' was unloaded; the trained adapter is in .*out"):
        run(resident, recipe, inputs, display)
    assert resident.claimed == ("tuned", True)
    assert [entry[2] for entry in resident.log if entry[0] == "publish"] == [4]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 12


def test_a_run_leaves_what_scripts_read(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs, tmp_path: Path
) -> None:
    recipe = make_recipe(plot_loss=True, save_steps=5, publish="tuned", publish_every_steps=4)
    result = run(resident, recipe, inputs, display, parameters=100)
    out = tmp_path / "out"
    assert (result.steps, result.interrupted, result.checkpoint) == (12, False, str((out / "checkpoint-12").resolve()))
    assert [entry[1] for entry in resident.log if entry[0] == "save"] == [
        "checkpoint-5",
        "checkpoint-10",
        "checkpoint-12",
    ]
    assert [entry[2] for entry in resident.log if entry[0] == "publish"] == [4, 8, 12]
    assert resident.count("forward_backward") == 12 and resident.sessions == {}  # a step travels as one call
    assert [step for step, _ in logged(out)] == list(range(1, 13))
    results = json.loads((out / "train_results.json").read_text())
    assert list(results) == [
        "epoch",
        "total_flos",
        "train_loss",
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
    ]
    assert results["epoch"] == 4.0 and results["total_flos"] == 6 * 100 * 4 * sum(
        row.num_tokens for row in inputs.train
    )
    assert json.loads((out / "all_results.json").read_text()) == results
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 12 and len(state["log_history"]) == 13
    assert state["log_history"][-1]["train_loss"] == results["train_loss"]
    for name in (
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "README.md",
        "training_loss.png",
    ):
        assert (out / name).stat().st_size > 0
    assert not list(out.glob(".tmp-*"))
    assert display.positions[-1] == (12, 12) and "training 9 parameters in 2 modules" in display
    assert "  model.layers.{0-1}.self_attn.q_proj" in display


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_resumed_run_is_the_unbroken_one(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    pairs: list[Pair],
    stage: str,
    tmp_path: Path,
) -> None:
    rows = Inputs(pairs if stage == "dpo" else examples, {})
    recipe = make_recipe(stage=stage, save_steps=5, logging_steps=2, lr_scheduler_type="cosine", warmup_steps=2)
    run(resident, dataclasses.replace(recipe, output_dir=tmp_path / "whole"), rows, display)

    def die(step: int) -> None:
        if step == 8:
            raise RuntimeFault("killed")

    resident.on_step = die
    with pytest.raises(RuntimeFault):
        run(resident, recipe, rows, display)
    assert resident.sessions == {}  # the server is there still: the session is closed
    resident.on_step = lambda step: None
    result = run(resident, recipe, rows, display)
    assert result.resumed_from and result.resumed_from.endswith("checkpoint-5")
    assert "resumed" in display and "at step 5 of 12 (epoch 1.67): 7 to go" in display
    whole, resumed = (json.loads((tmp_path / name / "trainer_state.json").read_text()) for name in ("whole", "out"))
    steps = [[entry for entry in state["log_history"] if "loss" in entry] for state in (whole, resumed)]
    assert steps[0] == steps[1] and [entry["step"] for entry in steps[0]] == [2, 4, 6, 8, 10, 12]
    assert logged(tmp_path / "whole") == logged(tmp_path / "out")
    assert whole["log_history"][-1]["train_loss"] == resumed["log_history"][-1]["train_loss"]


def test_a_finished_run_is_finished_again_without_a_step(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs
) -> None:
    run(resident, make_recipe(), inputs, display)
    steps = resident.count("optim_step")
    result = run(resident, make_recipe(), inputs, display)
    assert resident.count("optim_step") == steps and result.steps == 12 and "nothing is left to train" in display


def test_ctrl_c_ends_after_the_step_saves_and_can_be_resumed(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    inputs: Inputs,
    interrupt: Callable[[], None],
    tmp_path: Path,
) -> None:
    resident.on_step = lambda step: interrupt() if step == 4 else None
    result = run(resident, make_recipe(overwrite_output_dir=True), inputs, display)
    assert result.interrupted and result.steps == 4 and result.checkpoint and result.checkpoint.endswith("checkpoint-4")
    assert "interrupted: finishing this step" in display and resident.sessions == {}
    assert not (tmp_path / "out" / "train_results.json").exists()
    resident.on_step = lambda step: None
    again = make_recipe(overwrite_output_dir=True, resume_from_checkpoint=Path(result.checkpoint))
    assert run(resident, again, inputs, display).steps == 12 and resident.count("optim_step") == 12


def test_a_second_ctrl_c_stops_at_once(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    inputs: Inputs,
    interrupt: Callable[[], None],
) -> None:
    def twice(step: int) -> None:
        interrupt()
        interrupt()

    resident.on_step = twice
    with pytest.raises(KeyboardInterrupt):
        run(resident, make_recipe(), inputs, display)
    assert resident.count("save") == 0


def test_starting_over_replaces_the_log_and_goes_before_old_checkpoints(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs, tmp_path: Path
) -> None:
    run(resident, make_recipe(save_steps=5), inputs, display)
    shorter = make_recipe(save_steps=2, max_steps=4, overwrite_output_dir=True, save_total_limit=2)
    result = run(resident, shorter, inputs, display)
    assert result.resumed_from is None and len(logged(tmp_path / "out")) == 4
    kept = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-4"]  # the older run's went first, whatever their numbers


def test_a_run_that_would_be_another_is_not_resumed(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    inputs: Inputs,
    examples: list[Example],
) -> None:
    run(resident, make_recipe(max_steps=2), inputs, display)
    for recipe, rows, named in (
        (make_recipe(seed=7), inputs, "seed: was 42, is 7"),
        (make_recipe(per_device_train_batch_size=2), inputs, "per_device_train_batch_size: was 1, is 2"),
        (make_recipe(), Inputs(examples[1:], {}), "data: was '6 rows, "),
    ):
        with pytest.raises(ConflictError, match=named):
            run(resident, recipe, rows, display)
    run(resident, make_recipe(max_steps=5, learning_rate=0.02), inputs, display)
    assert "learning_rate: was 0.01 in checkpoint-2, is 0.02 from here on" in display


def test_results_without_a_checkpoint_are_not_overwritten(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs, tmp_path: Path
) -> None:
    run(resident, make_recipe(save_strategy="no", max_steps=2), inputs, display)
    assert not list((tmp_path / "out").glob("checkpoint-*")) and (tmp_path / "out/adapter_model.safetensors").exists()
    with pytest.raises(ConflictError, match=r"no checkpoint to resume from.*overwrite_output_dir: true"):
        run(resident, make_recipe(max_steps=2), inputs, display)


def test_an_adapter_without_its_optimizer_is_not_resumed(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs
) -> None:
    run(resident, make_recipe(save_only_model=True, max_steps=2), inputs, display)
    with pytest.raises(ConflictError, match="save_only_model"):
        run(resident, make_recipe(max_steps=4), inputs, display)


def test_the_best_checkpoint_is_kept_and_is_the_result(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
) -> None:
    resident.eval_losses = [3.0, 1.0, 2.0, 2.5]
    recipe = make_recipe(
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        save_total_limit=1,
        load_best_model_at_end=True,
        per_device_eval_batch_size=8,
        compute_accuracy=True,
        publish="best",
    )
    run(resident, recipe, Inputs(examples[:4], {"": examples[4:]}), display)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    assert ("load", "checkpoint-6") in resident.log and ("publish", "best", 6) in resident.log
    best = (out / "checkpoint-6" / "adapter_model.safetensors").read_bytes()
    assert (out / "adapter_model.safetensors").read_bytes() == best
    state = json.loads((out / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_metric"]) == (6, 1.0)
    assert state["best_model_checkpoint"].endswith("checkpoint-6")
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert evaluations[0]["eval_loss"] == 3.0 and 0 < evaluations[0]["eval_accuracy"] < 1
    assert (out / "training_eval_loss.png").exists() is False


def test_early_stopping_ends_after_evaluations_that_are_no_better(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], examples: list[Example]
) -> None:
    resident.eval_losses = [3.0, 1.0, 2.0, 2.5]
    recipe = make_recipe(eval_strategy="steps", eval_steps=1, early_stopping_steps=2)
    result = run(resident, recipe, Inputs(examples[:4], {"": examples[4:]}), display)
    assert result.steps == 4 and "2 evaluations without a better eval_loss than 1.0000" in display


def test_steps_before_an_early_end_are_logged(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
) -> None:
    resident.eval_losses = [3.0, 1.0, 2.0, 2.5]
    recipe = make_recipe(eval_strategy="steps", eval_steps=1, early_stopping_steps=2, logging_steps=3)
    run(resident, recipe, Inputs(examples[:4], {"": examples[4:]}), display)
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [3, 4]


@pytest.mark.parametrize("loads_best", [False, True])
def test_the_last_evaluation_is_made_and_said_once(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
    loads_best: bool,
) -> None:
    best = {"load_best_model_at_end": True, "save_steps": 6, "metric_for_best_model": "loss"} if loads_best else {}
    recipe = make_recipe(do_eval=True, val_size=2, eval_strategy="steps", eval_steps=6, **best)
    resident.eval_losses = [1.0, 2.0, 1.5]
    run(resident, recipe, Inputs(examples[:6], {"": examples[:1]}), display)
    said = [line for line in display.lines if "evaluation: " in line]
    # After steps 6 and 12; the best one's again, because the session holds another adapter than after step 12.
    assert len(said) == (3 if loads_best else 2)
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert results["eval_loss"] == (1.5 if loads_best else 2.0)
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert sum("eval_loss" in entry for entry in history) == len(said)


def test_do_eval_alone_evaluates_and_leaves_no_adapter(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
) -> None:
    recipe = make_recipe(do_train=False, do_eval=True, dataset=(), eval_on_each_dataset=True)
    run(resident, recipe, Inputs([], {"a": examples[:2], "b": examples[2:]}), display)
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert {"eval_a_loss", "eval_b_loss", "eval_b_runtime"} <= set(results) and resident.count("optim_step") == 0
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_do_eval_alone_leaves_what_training_left(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
) -> None:
    run(resident, make_recipe(max_steps=2), Inputs(examples, {}), display)
    log, state = (tmp_path / "out" / "trainer_log.jsonl").read_text(), (tmp_path / "out/trainer_state.json").read_text()
    recipe = make_recipe(do_train=False, do_eval=True, dataset=(), eval_dataset=("d",))
    result = run(resident, recipe, Inputs([], {"": examples[:2]}), display)
    assert result.resumed_from is None and (tmp_path / "out/trainer_state.json").read_text() == state
    assert (tmp_path / "out" / "trainer_log.jsonl").read_text().startswith(log)
    assert {"train_loss", "eval_loss"} <= set(json.loads((tmp_path / "out" / "all_results.json").read_text()))


def test_rows_longer_than_the_context_are_refused_before_a_session_exists(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs
) -> None:
    resident.context_tokens = 8
    with pytest.raises(InvalidValueError, match=r"cutoff_len: 2048.*10 tokens.*8"):
        run(resident, make_recipe(), inputs, display)
    assert resident.log == []


def test_two_trainers_cannot_use_one_directory(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs
) -> None:
    def second(step: int) -> None:
        if step == 1:
            with pytest.raises(ConflictError, match="in use by process"):
                run(resident, make_recipe(), inputs, display)

    resident.on_step = second
    run(resident, make_recipe(max_steps=1), inputs, display)


def test_an_incomplete_checkpoint_is_never_resumed(
    resident: CountingResident, display: Lines, make_recipe: Callable[..., Recipe], inputs: Inputs, tmp_path: Path
) -> None:
    run(resident, make_recipe(save_steps=5), inputs, display)
    out = tmp_path / "out"
    for name in ("checkpoint-12", "checkpoint-10"):
        (out / name / "trainer_state.json").unlink()
    shutil.copytree(out / "checkpoint-10", out / "checkpoint-11")
    result = run(resident, make_recipe(save_steps=5, resume_from_checkpoint=True), inputs, display)
    assert result.resumed_from == str((out / "checkpoint-5").resolve()) and result.steps == 12


def test_steps_before_one_that_is_not_finite_are_saved(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    inputs: Inputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = resident.begin_forward_backward

    def overflow(*arguments: Any, **settings: Any) -> Any:
        if resident.count("optim_step") == 6:
            raise NumericsError("the loss is nan")
        return compute(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(resident, "begin_forward_backward", overflow)
        said = r"step 7 of 12, learning rate 5.00e-03: the loss is nan; most often the rate is too high.*checkpoint-6$"
        with pytest.raises(NumericsError, match=said):
            run(resident, make_recipe(save_steps=5), inputs, display)
    saved = [entry[1] for entry in resident.log if entry[0] == "save"]
    assert saved == ["checkpoint-5", "checkpoint-6"] and resident.sessions == {}
    resumed_from = run(resident, make_recipe(save_steps=5), inputs, display).resumed_from
    assert resumed_from is not None and resumed_from.endswith("checkpoint-6")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_evaluation_that_is_no_number_ends_the_run_with_its_steps_saved(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
    value: float,
) -> None:
    resident.eval_losses = [value]
    recipe = make_recipe(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_steps=2)
    with pytest.raises(NumericsError, match=rf"evaluation after step 2: eval_loss is {value}; .*checkpoint-2$"):
        run(resident, recipe, Inputs(examples[:4], {"": examples[4:]}), display)
    state = (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text()
    assert json.loads(state, parse_constant=pytest.fail)["best_metric"] is None


def test_a_loss_that_is_no_number_is_neither_stepped_on_nor_written(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    inputs: Inputs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    finish = resident.finish_forward

    def nan(*arguments: Any) -> Any:
        return dataclasses.replace(finish(*arguments), loss=float("nan"))

    monkeypatch.setattr(resident, "finish_forward", nan)
    with pytest.raises(NumericsError, match=r"step 1 of 12, .*: loss is nan; nothing was trained yet"):
        run(resident, make_recipe(), inputs, display)
    assert resident.count("optim_step") == 0 and not (tmp_path / "out" / "trainer_log.jsonl").exists()


def test_save_strategy_best_saves_best_evaluations_alone(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    examples: list[Example],
    tmp_path: Path,
) -> None:
    resident.eval_losses = [3.0, 3.5, 1.0, 2.0]
    recipe = make_recipe(eval_strategy="steps", eval_steps=0.25, save_strategy="best")
    run(resident, recipe, Inputs(examples[:4], {"": examples[4:]}), display)
    out = tmp_path / "out"
    assert [entry[1] for entry in resident.log if entry[0] == "save"] == ["checkpoint-2", "checkpoint-6", "final"]
    state = json.loads((out / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_metric"], state["global_step"]) == (6, 1.0, 8)
    assert state["eval_steps"] == 2 and state["best_model_checkpoint"].endswith("checkpoint-6")
    last, best = ((out / name / "adapter_model.safetensors").read_bytes() for name in (".", "checkpoint-6"))
    assert last != best  # load_best_model_at_end is another wish
    assert ("load", "checkpoint-6") not in resident.log


def test_a_crash_while_saving_leaves_the_older_checkpoint_of_the_step(
    resident: CountingResident,
    display: Lines,
    make_recipe: Callable[..., Recipe],
    inputs: Inputs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    run(resident, make_recipe(max_steps=4), inputs, display)
    out = tmp_path / "out"
    kept = (out / "checkpoint-4" / "trainer_state.json").read_text()

    def crash(*_: Any) -> None:
        raise OSError("no space")

    again = make_recipe(max_steps=4, overwrite_output_dir=True)
    for where, name in ((training.checkpoints, "finish_checkpoint"), (training, "move_directory")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(where, name, crash)
            run(resident, again, inputs, display)
        assert (out / "checkpoint-4" / "trainer_state.json").read_text() == kept
        assert (out / ".tmp-checkpoint-4").is_dir()
    run(resident, again, inputs, display)
    assert (out / "checkpoint-4" / "trainer_state.json").read_text() != kept and not list(out.glob(".tmp-*"))
