"""Learning rates equal those that Hugging Face's Trainer uses, for every schedule that transformers has."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.cases import choose

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.recipe.schedules import ARGUMENTS, BY_METRIC, check_arguments
from kt_runtime.train.run.schedule import Schedule, num_steps

RATE = 1e-3
ROWS, BATCH, ACCUMULATION, EPOCHS = 23, 2, 3, 2.5

CASES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "linear", "warmup_steps": 3},
    {"lr_scheduler_type": "linear", "warmup_steps": 0.25},
    {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
    {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.5}},
    {"lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 2, "lr_scheduler_kwargs": {"num_cycles": 3}},
    {"lr_scheduler_type": "polynomial", "warmup_steps": 2, "lr_scheduler_kwargs": {"lr_end": 1e-5, "power": 2.0}},
    {"lr_scheduler_type": "constant", "warmup_steps": 2},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4},
    {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3},
    {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 5}},
    {"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 2, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "warmup_steps": 2, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"num_decay_steps": 4, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    },
]
LOSSES = [3.0, 2.0, 1.0, 1.0, 1.5, 1.4, 1.4, 0.5, 0.6, 0.7, 0.7, 0.4, 0.3, 0.2, 0.6, 0.7]
METRIC_CASES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 0.5, "patience": 1}},
    {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5, "min_lr": 1e-5, "smooth": True},
    },
]


class _Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


def trainer_rates(directory: Path, case: dict[str, Any], evaluate: bool = False) -> tuple[list[float], list[int]]:
    """The rates, and after which step each evaluation was; an epoch's end repeats one. Evaluations say LOSSES."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # a second, for the one process that runs this

    rates: list[float] = []
    evaluated: list[int] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    class Evaluating(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            evaluated.append(self.state.global_step)
            return {"eval_loss": LOSSES[len(evaluated) - 1]}

    rows = [{"x": torch.ones(1)} for _ in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        num_train_epochs=EPOCHS,
        learning_rate=RATE,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=1,
        **case,
    )
    Evaluating(_Line(), arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=[Rates()]).train()
    return rates, evaluated


def recipe(**keys: Any) -> Recipe:
    sizes = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION}
    return Recipe(**{"learning_rate": RATE, "num_train_epochs": EPOCHS, **sizes, **keys})


def learning_rates(mine: Recipe, steps: int) -> list[float]:
    schedule = Schedule(mine, steps)
    return [schedule[step] for step in range(steps)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rates_and_steps_are_those_of_hugging_faces_trainer(tmp_path: Path, case: dict[str, Any]) -> None:
    mine = recipe(**case)
    rates = learning_rates(mine, num_steps(mine, ROWS))
    assert rates == trainer_rates(tmp_path, case)[0]


@pytest.mark.parametrize("case", METRIC_CASES, ids=lambda case: case["lr_scheduler_type"])
def test_schedules_that_follow_a_metric_follow_it_as_the_trainers_do(tmp_path: Path, case: dict[str, Any]) -> None:
    expected, evaluated = trainer_rates(tmp_path, case, evaluate=True)
    losses = iter(LOSSES)
    schedule = Schedule(recipe(**case), len(expected))
    rates = []
    for step in range(len(expected)):
        rates.append(schedule[step])
        for _ in range(evaluated.count(step + 1)):
            schedule.evaluated(next(losses))
        # A run that stops here continues with the same rates.
        state = json.loads(json.dumps(schedule.state(), allow_nan=False))
        schedule = Schedule(recipe(**case), len(expected))
        schedule.restore(state)
    assert rates == expected
    assert len(set(rates)) > 1


def test_a_schedule_of_the_step_has_no_state(tmp_path: Path) -> None:
    schedule = Schedule(recipe(lr_scheduler_type="cosine"), 10)
    before = schedule[5]
    schedule.evaluated(1.0)
    assert schedule.state() == {} and schedule[5] == before


def test_warmup_ratio_is_a_share_and_warmup_steps_goes_first() -> None:
    assert learning_rates(recipe(warmup_ratio=0.25), 9) == learning_rates(recipe(warmup_steps=3), 9)
    assert learning_rates(recipe(warmup_ratio=0.9, warmup_steps=3), 9) == learning_rates(recipe(warmup_steps=3), 9)


def test_steps_go_before_epochs_and_a_last_small_batch_is_a_step() -> None:
    assert num_steps(recipe(max_steps=5), ROWS) == 5
    assert num_steps(recipe(num_train_epochs=1.0), 7) == 2
    assert num_steps(recipe(num_train_epochs=0.001), 7) == 1


def test_settings_that_transformers_refuses_are_the_users_mistake() -> None:
    with pytest.raises(InvalidValueError, match="polynomial: lr_end"):
        Schedule(recipe(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1.0}), 5)


def test_a_million_rates_take_seconds() -> None:
    count = choose(few=100_000, usual=1_000_000, every=1_000_000)
    assert len(learning_rates(recipe(lr_scheduler_type="cosine"), count)) == count


def test_the_table_of_settings_is_transformers_signatures() -> None:
    from transformers import SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

    assert set(ARGUMENTS) == {kind.value for kind in SchedulerType}
    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}
    for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        signature: Any = function
        if kind == SchedulerType.GREEDY:
            signature = GreedyLR
        elif kind == SchedulerType.REDUCE_ON_PLATEAU:
            signature = torch.optim.lr_scheduler.ReduceLROnPlateau
        known = set(inspect.signature(signature).parameters) - given - {"verbose"}
        if kind == SchedulerType.CONSTANT_WITH_WARMUP:
            known = set()
        assert set(ARGUMENTS[kind.value]) == known, kind
    assert set(BY_METRIC) < set(ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "values", "wrong"),
    [
        ("cosine", {"num_cycles": 2}, []),
        ("cosine", {"cycles": 2}, ["cycles"]),
        ("constant", {"num_cycles": 2}, ["num_cycles"]),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "min_lr_rate": 0.1}, [""]),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "exp"}, ["decay_type"]),
    ],
)
def test_settings_are_checked_one_by_one(name: str, values: dict[str, Any], wrong: list[str]) -> None:
    assert [key for key, _ in check_arguments(name, values)[1]] == wrong
