"""Alpaca rows: the question in one or two columns, the answer in another, earlier turns in a list of pairs."""

from __future__ import annotations

from kt_runtime.train.data.catalog import DatasetInfo
from kt_runtime.train.data.conversations import Message
from kt_runtime.train.data.rows import Row
from kt_runtime.train.data.turns import Cells, Turns, read_tools


def read_turns(row: Row, info: DatasetInfo) -> Turns:
    """Raises InvalidValueError for a column that is missing or of the wrong type."""
    cells = Cells(row, info)
    answers = ("chosen", "rejected") if info.ranking else ("response",)
    cells.present("prompt", "query")
    for name in answers:
        cells.present(name)
    return _turns(cells, [cells.text(name) for name in answers])


def read_question(row: Row, info: DatasetInfo) -> Turns:
    """As `read_turns`, where the answer may be missing, and may be a number: `answers` has one message or none."""
    cells = Cells(row, info)
    cells.present("prompt", "query")
    answer = cells.value("response")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    elif answer is not None:
        answer = cells.text("response")
    return _turns(cells, [] if answer is None else [answer])


def _turns(cells: Cells, answers: list[str]) -> Turns:
    question = "\n".join(filter(None, (cells.text("prompt"), cells.text("query"))))
    if not question:
        raise cells.error("query" if cells.column("prompt") is None else "prompt", "the question must not be empty")
    return Turns(
        system=cells.text("system"),
        messages=[*_history(cells), {"role": "user", "content": question}],
        answers=tuple({"role": "assistant", "content": answer} for answer in answers),
        tools=read_tools(cells),
    )


def _history(cells: Cells) -> list[Message]:
    turns = cells.structure("history") or []
    good = isinstance(turns, list) and all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns
    )
    if not good:
        raise cells.error("history", "must be a list of [question, answer] pairs")
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
