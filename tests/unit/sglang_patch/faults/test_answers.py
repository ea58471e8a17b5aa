"""SGLang's answer to a control request that failed reaches whoever waits for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kt_runtime.errors import NotFoundError
from kt_runtime.sglang_patch.faults import answers as fault_answers


class Asked(msgspec.Struct, kw_only=True):
    rid: str | None = None
    session_id: str


class Answer(msgspec.Struct, kw_only=True):
    """As SGLang's `OpenSessionReqOutput`, whose session is the one that is waited for."""

    rid: str | None = None
    session_id: str | None
    success: bool
    num_pages: int
    message: str = ""


def test_failure_names_the_session_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_answers, "_answer_type", lambda _: Answer)
    answer: Any = fault_answers.failure_of(Asked(session_id="s1"), NotFoundError("no such thing"))
    assert answer == Answer(session_id="s1", success=False, num_pages=0, message="no such thing")


def test_message_without_an_answer_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_answers, "_answer_type", lambda _: None)
    assert fault_answers.failure_of(Asked(session_id="s1"), ValueError()) is None
