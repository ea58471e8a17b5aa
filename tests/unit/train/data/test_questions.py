"""Rows of reinforcement learning: questions whose answers, if any, are for the reward alone."""

from __future__ import annotations

import io
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data import Question

GRPO = {"stage": "grpo"}


def test_an_alpaca_row_is_a_question_with_all_of_its_columns(datasets: Any) -> None:
    rows = [{"instruction": "add", "input": "1 + 1", "output": "2", "level": 3}, {"instruction": "speak", "output": 7}]
    first, second = datasets.read_rows(rows, GRPO)
    assert isinstance(first, Question)
    assert first.messages == ({"role": "user", "content": "add\n1 + 1"},)
    assert (first.answer, first.columns, first.where.rpartition("/")[2]) == ("2", rows[0], "d.jsonl:1")
    assert second.answer == "7"


def test_an_answer_may_be_missing_and_its_column_unnamed(datasets: Any) -> None:
    (made,) = datasets.read_rows([{"q": "why?", "topic": "x"}], GRPO, columns={"prompt": "q"})
    assert (made.answer, made.columns) == (None, {"q": "why?", "topic": "x"})


def test_a_chat_ends_with_a_question_or_with_the_answer(datasets: Any) -> None:
    asked = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "one"}, {"from": "human", "value": "2?"}]
    rows = [{"conversations": asked}, {"conversations": [*asked, {"from": "gpt", "value": "two"}], "level": 1}]
    open_one, answered = datasets.read_rows(rows, GRPO, formatting="sharegpt")
    assert open_one.messages == answered.messages
    assert [message["content"] for message in open_one.messages] == ["1?", "one", "2?"]
    assert (open_one.answer, answered.answer, answered.columns["level"]) == (None, "two", 1)


def test_a_table_gives_every_column(datasets: Any) -> None:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"instruction": ["q"], "output": ["a"], "level": [5]}), file)
    datasets.add(file.getvalue(), file_name="d.parquet")
    (made,) = datasets.read(**GRPO)
    assert made.columns == {"instruction": "q", "output": "a", "level": 5}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "q", "output": ["a"]}, r"d\.jsonl:1: output: \['a'\]: must be text"),
        ({"instruction": "", "output": "a"}, r"d\.jsonl:1: instruction: '': the question must not be empty"),
        ({"output": "a"}, r"d\.jsonl:1: no column 'instruction' or 'input'"),
    ],
)
def test_a_row_that_is_no_question_is_named(datasets: Any, row: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        datasets.read_rows([row], GRPO)


def test_pairs_of_answers_are_no_questions(datasets: Any) -> None:
    row = {"instruction": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(InvalidValueError, match="stage: grpo: does not fit dataset 'd'"):
        datasets.read_rows([row], GRPO, ranking=True)
