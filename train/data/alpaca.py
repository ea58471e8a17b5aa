"""Alpaca rows: the question in one or two columns, the answer in another, earlier turns in a list of pairs."""

from __future__ import annotations

from kt_runtime.train.data.catalog import DatasetInfo
from kt_runtime.train.data.conversations import Message
from kt_runtime.train.data.rows import Row
from kt_runtime.train.data.turns import Cells, Turns, read_tools


def read_turns(row: Row, info: DatasetInfo) -> Turns:
    """Raises InvalidValueError for a column that is missing or of the wrong type."""
    cells = Cells(row, info)
    cells.present("prompt", "query")
    answers = ("chosen", "rejected") if info.ranking else ("response",)
    for name in answers:
        cells.present(name)
    question = "\n".join(filter(None, (cells.text("prompt"), cells.text("query"))))
    if not question:
        raise cells.error("prompt" if info.columns["prompt"] else "query", "the question must not be empty")
    return Turns(
        system=cells.text("system"),
        messages=[*_history(cells), {"role": "user", "content": question}],
        answers=tuple({"role": "assistant", "content": cells.text(name)} for name in answers),
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
