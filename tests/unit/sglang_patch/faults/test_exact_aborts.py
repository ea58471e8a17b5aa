"""A client's request id may be the beginning of another's: closing its connection ends its own request only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.faults.exact_aborts import abort_exactly


def as_sglang(scheduler: Any, message: Any) -> None:
    """SGLang's rule in every place where it looks: the beginning of the id."""
    for req in [scheduler.chunked_req, *scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]:
        req.aborted |= message.abort_all or req.rid.startswith(message.rid)
    for req in scheduler.collect_inflight_reqs():
        req.aborted |= message.abort_all or req.rid.startswith(message.rid)


def scheduler_of(chunked: str, waiting: str, grammar: str, running: list[str]) -> tuple[Any, list[Any]]:
    requests = [SimpleNamespace(rid=rid, aborted=False) for rid in (chunked, waiting, grammar, *running)]
    scheduler = SimpleNamespace(
        chunked_req=requests[0],
        waiting_queue=[requests[1]],
        grammar_manager=SimpleNamespace(grammar_queue=[requests[2]]),
        collect_inflight_reqs=lambda: requests[3:],
    )
    return scheduler, requests


@pytest.mark.parametrize("asked", ["a", "a1", "a1f", "b", "unknown"])
def test_only_the_request_with_that_id_is_aborted(asked: str) -> None:
    scheduler, requests = scheduler_of("a1", "a1f", "a1f0", ["a", "b", "a1f00", "ba"])
    names = [req.rid for req in requests]
    abort_exactly(as_sglang, scheduler, SimpleNamespace(rid=asked, abort_all=False))
    assert [req.rid for req in requests if req.aborted] == [name for name in names if name == asked]
    assert [req.rid for req in requests] == names


def test_all_are_aborted_where_that_is_asked_for() -> None:
    scheduler, requests = scheduler_of("a1", "a1f", "b", ["c"])
    abort_exactly(as_sglang, scheduler, SimpleNamespace(rid="", abort_all=True))
    assert all(req.aborted for req in requests)


def test_ids_are_given_back_when_aborting_fails() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError

    scheduler, requests = scheduler_of("a1", "a1f", "b", ["c"])
    with pytest.raises(RuntimeError):
        abort_exactly(fail, scheduler, SimpleNamespace(rid="a", abort_all=False))
    assert [req.rid for req in requests] == ["a1", "a1f", "b", "c"]
