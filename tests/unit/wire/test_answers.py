from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.errors import ConflictError, ServerBusyError
from kt_runtime.wire.answers import Admission, AnswerBook, content_digest


def make_book(**options: int) -> AnswerBook:
    defaults: dict[str, Any] = {
        "answers_kept": 3,
        "answers_kept_bytes": 1000,
        "ids_kept": 4,
        "max_pending": 5,
        "max_pending_bytes": 1000,
    }
    return AnswerBook(**{**defaults, **options})


def carry_out(book: AnswerBook, request_id: str, answer: bytes = b"answer") -> None:
    assert book.admit(request_id, b"me", [b"x"]) is Admission.NEW
    assert book.finish(request_id, [answer]) == b"me"


def test_the_last_to_ask_is_the_one_to_answer() -> None:
    book = make_book()
    assert book.admit("a", b"first", [b"x"]) is Admission.NEW
    assert book.admit("a", b"second", [b"x"]) is Admission.IN_PROGRESS
    assert book.finish("a", [b"answer"]) == b"second"
    assert book.admit("a", b"third", [b"x"]) == [b"answer"]


def test_where_a_frame_ends_is_part_of_the_content() -> None:
    assert content_digest([b"ab", b"c"]) != content_digest([b"a", b"bc"])
    assert content_digest([b"abc"]) != content_digest([b"abc", b""])


def test_the_oldest_answers_are_dropped_first_and_their_ids_after_them() -> None:
    book = make_book()
    for request_id in "abcdefghij":
        carry_out(book, request_id)
    for kept in "hij":
        assert book.admit(kept, b"me", [b"x"]) == [b"answer"]
    for expired in "defg":
        with pytest.raises(ConflictError, match="no longer kept"):
            book.admit(expired, b"me", [b"x"])
    assert book.admit("a", b"me", [b"x"]) is Admission.NEW  # so long ago that the id is forgotten too


def test_answers_are_bounded_in_bytes_but_the_newest_is_kept() -> None:
    book = make_book(answers_kept_bytes=10)
    carry_out(book, "a", b"1234")
    carry_out(book, "b", b"5" * 50)
    assert book.admit("b", b"me", [b"x"]) == [b"5" * 50]
    with pytest.raises(ConflictError):
        book.admit("a", b"me", [b"x"])
    carry_out(book, "c", b"12345")
    carry_out(book, "d", b"12345")
    assert book.admit("c", b"me", [b"x"]) == [b"12345"]


def test_requests_in_progress_are_bounded_in_number_and_bytes() -> None:
    book = make_book(max_pending=2)
    book.admit("a", b"me", [b"x"])
    book.admit("b", b"me", [b"x"])
    with pytest.raises(ServerBusyError, match="2 requests are in progress"):
        book.admit("c", b"me", [b"x"])
    assert book.admit("a", b"me", [b"x"]) is Admission.IN_PROGRESS
    book.finish("a", [b"answer"])
    assert book.admit("c", b"me", [b"x"]) is Admission.NEW
    book = make_book(max_pending_bytes=100)
    assert book.admit("a", b"me", [b"x" * 500]) is Admission.NEW  # alone, any size that the codec allows
    with pytest.raises(ServerBusyError, match="500 bytes are in progress and 1 more"):
        book.admit("b", b"me", [b"x"])
    book.finish("a", [b""])
    assert book.admit("b", b"me", [b"x"]) is Admission.NEW
