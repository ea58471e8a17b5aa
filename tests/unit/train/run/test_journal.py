"""The journal writes what LLaMA-Factory's users read, and continues after a restart as if there had been none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.resident.counting_resident import Lines

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.cadence import Cadence
from kt_runtime.train.run.journal import Journal
from kt_runtime.train.stages.objective import Outcome


@pytest.fixture
def make(tmp_path: Path, make_recipe: Callable[..., Recipe], display: Lines) -> Any:
    def journal(**keys: Any) -> Journal:
        now = [100.0]
        made = Journal(
            tmp_path,
            Cadence(make_recipe(logging_steps=2, **keys), 4, 2),
            display,
            parameters=10,
            clock=lambda: now[0],
        )
        made.now = now  # type: ignore[attr-defined]
        return made

    return journal


def advance(journal: Any, losses: list[float]) -> None:
    for loss in losses:
        journal.now[0] += 10.0
        journal.step(Outcome(loss, 50, 4, {"rewards/accuracies": loss / 4}), 0.1, 1.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "trainer_log.jsonl").read_text().splitlines()]


def test_lines_have_the_keys_and_values_that_scripts_expect(make: Any, display: Lines, tmp_path: Path) -> None:
    journal = make()
    advance(journal, [4.0, 2.0, 1.0, 0.5])
    first, last = lines(tmp_path)
    assert first == {
        "current_steps": 2,
        "total_steps": 4,
        "loss": 3.0,
        "accuracy": 0.75,
        "lr": 0.1,
        "epoch": 1.0,
        "percentage": 50.0,
        "elapsed_time": "0:00:20",
        "remaining_time": "0:00:20",
        "throughput": 5.0,
        "total_tokens": 100,
    }
    assert last["loss"] == 0.75 and last["remaining_time"] == "0:00:00"
    assert "step 2/4  loss 3.0000  accuracy 0.750" in display
    results = journal.finish()
    assert results == {
        "epoch": 2.0,
        "total_flos": 6.0 * 10 * 200,
        "train_loss": 1.875,
        "train_runtime": 40.0,
        "train_samples_per_second": 0.4,
        "train_steps_per_second": 0.1,
    }
    assert json.loads((tmp_path / "train_results.json").read_text()) == results
    journal.finish_evaluation({"eval_loss": 1.0})
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"epoch": 2.0, "eval_loss": 1.0}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {**results, "eval_loss": 1.0}


def test_a_restored_journal_continues_without_a_line_twice(make: Any, tmp_path: Path) -> None:
    whole = make()
    advance(whole, [4.0, 2.0, 1.0])
    state = json.loads(json.dumps({**whole.state(), "history": whole.history}))
    whole.evaluated({"eval_loss": 9.0, "eval_runtime": 1.0})
    advance(whole, [0.5])
    with (tmp_path / "trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 5, "cut o')
    resumed = make()
    resumed.restore(3, state["history"], state)
    assert [line["current_steps"] for line in lines(tmp_path)] == [2, 3]  # the evaluation after step 3 is kept
    advance(resumed, [0.5])
    assert [line.get("loss") for line in lines(tmp_path)] == [3.0, None, 0.75]
    assert lines(tmp_path)[-1]["elapsed_time"] == "0:00:40" and lines(tmp_path)[-1]["total_tokens"] == 200
    assert resumed.finish()["train_loss"] == 1.875 and resumed.loss_first == 4.0


def test_tokens_per_second_are_reported_when_asked_for(make: Any) -> None:
    journal = make(include_effective_tokens_per_second=True)
    advance(journal, [1.0])
    assert journal.finish()["effective_tokens_per_sec"] == 5.0
