"""The recipe's datasets together: stage, samples, mixing, what is left out and said, and how long it takes."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kt_runtime.configs
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.data import read_all_that_can_be, read_datasets, read_named


def alpaca(count: int, text: str = "q") -> list[dict[str, str]]:
    return [{"instruction": f"{text}{i}", "output": "a"} for i in range(count)]


def questions(rows: list[Any]) -> list[str]:
    return [row.messages[0]["content"] for row in rows]


def test_max_samples_takes_the_first_of_each_dataset(datasets: Any) -> None:
    datasets.add(alpaca(5), name="d")
    datasets.add(alpaca(2, "r"), name="e", file_name="e.csv")
    assert questions(datasets.read("d", "e", max_samples=3)) == ["q0", "q1", "q2", "r0", "r1"]
    named = read_named(datasets.recipe(mix_strategy="interleave_under"), ("d", "e"), datasets.said.append)
    assert [name for name, _ in named] == ["d"] * 5 + ["e"] * 2


def test_num_samples_draws_rows_and_repeats_some_beyond_all(datasets: Any) -> None:
    datasets.add(alpaca(50), num_samples=10)
    drawn = questions(datasets.read())
    assert len(set(drawn)) == 10
    assert drawn != [f"q{i}" for i in range(10)]
    assert questions(datasets.read()) == drawn != questions(datasets.read(seed=1)), "the seed decides"
    assert len(datasets.read(max_samples=4)) == 4
    datasets.add(alpaca(3), num_samples=8)
    counts = Counter(questions(datasets.read()))
    assert set(counts) == {"q0", "q1", "q2"}
    assert counts.total() == 8


@pytest.mark.parametrize("entry", [{}, {"num_samples": 3}])
def test_rows_that_cant_be_read_are_all_reported(datasets: Any, entry: dict[str, int]) -> None:
    good = json.dumps(alpaca(1)[0])
    datasets.add("\n".join([good, "7", good, '"text"', good]).encode(), **entry)
    problems: list[str] = []
    rows = list(read_all_that_can_be(datasets.recipe(), ("d",), lambda error: problems.append(str(error))))
    assert len(rows) == 3
    assert ["d.jsonl:2" in problems[0], "d.jsonl:4" in problems[1], len(problems)] == [True, True, 2]


def test_datasets_are_interleaved_as_the_recipe_says(datasets: Any) -> None:
    for name, count in (("d", 3), ("e", 2)):
        datasets.add(alpaca(count, name), name=name, file_name=f"{name}.json")
    assert questions(datasets.read("d", "e", mix_strategy="interleave_under")) == ["d0", "e0", "d1", "e1"]
    over = {"mix_strategy": "interleave_over", "interleave_probs": (0.9, 0.1), "seed": 3}
    drawn = questions(datasets.read("d", "e", **over))
    assert drawn == questions(datasets.read("d", "e", **over))
    assert {"d0", "d1", "d2", "e0", "e1"} == set(drawn)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"interleave_probs": (0.5,)}, r"interleave_probs: \[0.5\]: 1 shares for 2 datasets \(d, d\)"),
        ({"interleave_probs": (0.5, 0.4)}, r"they sum to 0.9"),
        ({"interleave_probs": (1.0, 0.0)}, r"must be above 0"),
        ({"mix_strategy": "interleave"}, "unknown mix_strategy 'interleave'; did you mean 'interleave_"),
    ],
)
def test_mixing_that_cannot_be_is_refused(datasets: Any, keys: dict[str, Any], expected: str) -> None:
    datasets.add(alpaca(1))
    with pytest.raises((InvalidValueError, UnknownNameError), match=f"recipe.yaml:3: .*{expected}"):
        datasets.read("d", "d", **{"mix_strategy": "interleave_under", **keys})


@pytest.mark.parametrize(("stage", "ranking", "fits"), [("dpo", False, "sft"), ("sft", True, "dpo")])
def test_a_dataset_must_fit_the_stage(datasets: Any, stage: str, ranking: bool, fits: str) -> None:
    path = datasets.add(alpaca(1), ranking=ranking)
    expected = rf"recipe.yaml:3: stage: {stage}: does not fit dataset 'd' \({path}\).* fits stage: {fits}"
    with pytest.raises(InvalidValueError, match=expected):
        datasets.read(stage=stage)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same answer"),
        ({"instruction": "q", "chosen": "a", "rejected": ""}, "one of its answers is empty"),
        ({"instruction": "q", "chosen": None, "rejected": "b"}, "one of its answers is empty"),
    ],
)
def test_pairs_that_teach_nothing_are_left_out(datasets: Any, row: Any, reason: str) -> None:
    good = {"instruction": "q", "chosen": "a", "rejected": "b"}
    made = datasets.read_rows([row, good], {"stage": "dpo"}, ranking=True, file_name="d.json")
    assert len(made) == 1
    assert datasets.said[0].endswith(f"d.json:2: left out: {reason}")


def test_five_rows_are_named_and_all_are_counted(datasets: Any) -> None:
    rows = [{"instruction": "q", "output": "" if i % 2 else "a"} for i in range(20)]
    assert len(datasets.read_rows(rows)) == 10
    *named, count = datasets.said
    assert [line.split(": left out")[0].rsplit(":", 1)[1] for line in named] == ["2", "4", "6", "8", "10"]
    assert count == "dataset d: 10 of 20 rows left out"


def test_a_dataset_of_which_nothing_is_left_is_an_error(datasets: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"d: .*d.jsonl: every row was left out; there is nothing to learn"):
        datasets.read_rows([{"instruction": "q", "output": ""}])
    assert datasets.said[-1] == "dataset d: 1 of 1 rows left out"


def test_a_row_read_again_is_said_once(datasets: Any) -> None:
    datasets.add([{"instruction": "q", "output": ""}, *alpaca(1)])
    datasets.add(alpaca(5), name="e", file_name="e.json")
    assert len(datasets.read("d", "e", mix_strategy="interleave_over")) == 10
    assert len(datasets.said) == 2


def test_names_are_checked_before_the_first_row_is_asked_for(datasets: Any) -> None:
    datasets.add(alpaca(1))
    with pytest.raises(UnknownNameError):
        read_datasets(datasets.recipe(), ("d", "e"), datasets.said.append)


@pytest.mark.slow
def test_ten_thousand_rows_take_a_moment_and_little_memory(datasets: Any) -> None:
    line = json.dumps({"instruction": "q" * 250, "input": "", "output": "a" * 250})
    path = datasets.directory / "d.jsonl"
    path.write_text(f"{line}\n" * 10_000)
    datasets.describe(file_name="d.jsonl")
    start = time.process_time()
    assert sum(1 for _ in read_datasets(datasets.recipe(), ("d",), datasets.said.append)) == 10_000
    seconds = time.process_time() - start
    tracemalloc.start()
    for _ in read_datasets(datasets.recipe(max_samples=2000), ("d",), datasets.said.append):
        pass
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 2.4, "processor time; 0.10 s was measured on a Zen 5, 0.24 s on a Zen 3"
    assert peak_bytes < 1_000_000, "rows are not kept: 2,000 of them hold 1 MB of text alone"


def test_every_dataset_of_the_demos_world_is_read_whole(datasets: Any) -> None:
    world = Path(next(iter(kt_runtime.configs.__path__))) / "world"
    for name, entry in json.loads((world / "dataset_info.json").read_text()).items():
        stage = "dpo" if entry.get("ranking") else "sft"
        assert datasets.read(name, dataset_dir=world, stage=stage)
        assert datasets.said == []
