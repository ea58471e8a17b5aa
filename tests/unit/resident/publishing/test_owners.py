"""Which session may publish a name, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.lora import random_adapter, write_adapter
from reference.resident.desk import Desk

from kt_runtime.adapters import AdapterVersion
from kt_runtime.errors import ConflictError


def test_the_owner_is_shown_and_another_session_is_refused_unless_it_takes_over(desk: Desk, tmp_path: Path) -> None:
    first, second = desk.session("first"), desk.session("second")
    desk.publish("bob", 1, session=first)
    desk.settle()
    assert desk.info("bob").owner == "first" and desk.info("bob").owned_since > 0
    with pytest.raises(ConflictError, match=r"'bob' is published by session 'first' since \d{4}-.*take_over"):
        desk.publish("bob", 2, session=second)
    with pytest.raises(ConflictError, match="published by session 'first'"):
        desk.publisher.load("bob", str(tmp_path), desk.outcomes.append)
    desk.publish("bob", 2, session=second, take_over=True)
    desk.settle()
    assert desk.info("bob").owner == "second" and desk.current("bob") == desk.outcomes[-1].hash
    with pytest.raises(ConflictError, match="published by session 'second'"):
        desk.publish("bob", 3, session=first)
    desk.publisher.owners.end(second)
    assert desk.info("bob").owner is None
    with pytest.raises(ConflictError, match=r"was taken over by session 'second' at .*again, set take_over"):
        desk.publish("bob", 3, session=first)
    desk.publish("bob", 3, session=first, take_over=True)
    desk.settle()
    assert desk.info("bob").owner == "first"


def test_a_session_whose_name_was_unloaded_is_told_at_its_next_publication(desk: Desk) -> None:
    session = desk.session("run")
    desk.publish("bob", 1, session=session)
    desk.settle()
    desk.forget("bob")
    with pytest.raises(ConflictError, match=r"'bob' was unloaded at .* after session 'run' had published it"):
        desk.publish("bob", 2, session=session)
    assert desk.publisher.adapters() == []
    desk.publish("bob", 2, session=desk.session("another"))
    desk.settle()
    assert desk.info("bob").owner == "another"


def test_unloading_during_the_first_publication_is_not_undone_by_the_second(desk: Desk) -> None:
    session = desk.session("run")
    desk.publisher.owners.claim("bob", session)  # as a run does when it begins
    desk.publish("bob", 1, session=session)
    assert desk.forget("bob") == [None]
    with pytest.raises(ConflictError, match=r"'bob' was unloaded at .*to publish it again, set take_over"):
        desk.publish("bob", 2, session=session)


def test_nor_by_a_session_that_had_not_claimed_the_name(desk: Desk) -> None:
    """A client that only publishes owns a name once its first publication has ended."""
    first, second = desk.session("first"), desk.session("second")
    desk.publish("bob", 1, session=first)
    desk.publish("bob", 2, session=second)
    assert desk.forget("bob") == [None]
    for session in (first, second):
        with pytest.raises(ConflictError, match=r"'bob' was unloaded at .*had published it or begun to"):
            desk.publish("bob", 3, session=session)
    desk.publish("bob", 3, session=first, take_over=True)
    desk.settle()
    assert desk.info("bob").owner == "first"


def test_of_two_sessions_at_once_the_first_gets_the_name(desk: Desk) -> None:
    for seed, name in ((1, "first"), (2, "second")):
        desk.publish("bob", seed, session=desk.session(name))
    desk.settle()
    assert isinstance(desk.outcomes[0], AdapterVersion)
    assert "published by session 'first'" in str(desk.outcomes[1])


def test_a_publication_that_failed_owns_nothing_and_one_of_an_ended_session_neither(desk: Desk) -> None:
    session = desk.session("run")
    desk.host.move_error = ConflictError("no")
    desk.publish("bob", 1, session=session)
    desk.settle()
    assert desk.publisher.owners.of("bob") is None
    desk.host.move_error = None
    desk.publish("bob", 1, session=session)
    desk.publisher.owners.end(session)
    desk.settle()
    assert desk.info("bob").owner is None


def test_a_directory_takes_a_name_over_when_it_says_so(desk: Desk, tmp_path: Path) -> None:
    session = desk.session("run")
    desk.publish("bob", 1, session=session)
    desk.settle()
    write_adapter(tmp_path / "a", random_adapter(desk.host.config, rank=4, alpha=8.0, seed=1))
    desk.publisher.load("bob", str(tmp_path / "a"), desk.outcomes.append, take_over=True)
    desk.settle()
    assert desk.info("bob").owner is None
    with pytest.raises(ConflictError, match="was taken over by loading another adapter under the name"):
        desk.publish("bob", 2, session=session)


# What is not on disk.
