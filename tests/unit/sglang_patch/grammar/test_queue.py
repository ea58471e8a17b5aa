"""Compiled once for all who wait, ended when nobody does, kept within bounds. The grammars here are stand-ins."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from kt_runtime.sglang_patch.grammar.client import current_cancellation
from kt_runtime.sglang_patch.grammar.queue import MAX_KEPT, MAX_REFUSED, GrammarCache, GrammarExecutor
from kt_runtime.sglang_patch.grammar.step import Failure

WAIT_SECONDS = 60


@dataclass
class Process:
    ended: bool = False
    failure: Failure | None = None


@dataclass
class Grammar:
    process: Process | None = field(default_factory=Process)
    error_message: str = ""
    reasoning: bool | None = None

    def copy(self) -> Grammar:
        return Grammar(self.process)

    def maybe_init_reasoning(self, reasoning: bool) -> None:
        self.reasoning = reasoning


class Compiling:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.was_cancelled = threading.Event(), threading.Event(), threading.Event()
        self.keys: list[Any] = []

    def __call__(self, key: Any, _require_reasoning: bool) -> Grammar:
        self.keys.append(key)
        cancellation = current_cancellation.get()
        assert cancellation is not None
        with cancellation.ends(self.end):
            self.begun.set()
            assert self.may_end.wait(WAIT_SECONDS)
        return Grammar()

    def end(self) -> None:
        self.was_cancelled.set()
        self.may_end.set()


@pytest.fixture
def cache() -> GrammarCache:
    return GrammarCache(lambda grammar: grammar.process, lambda reason: Grammar(None, reason))


def test_requests_with_one_grammar_share_its_compilation_and_get_one_each() -> None:
    executor, compiling = GrammarExecutor(), Compiling()
    futures = [executor.submit(compiling, ("regex", "a"), True) for _ in range(3)]
    other = executor.submit(compiling, ("regex", "a"), False)
    compiling.may_end.set()
    grammars = [future.result(WAIT_SECONDS) for future in futures]
    assert len({id(grammar) for grammar in grammars}) == 3
    assert len({id(grammar.process) for grammar in grammars}) == 1
    assert [grammar.reasoning for grammar in grammars[1:]] == [True, True]
    assert other.result(WAIT_SECONDS).process is not grammars[0].process
    assert len(compiling.keys) == 2


def test_a_compilation_continues_for_those_who_still_wait_and_ends_with_the_last() -> None:
    executor, compiling = GrammarExecutor(), Compiling()
    first, second = (executor.submit(compiling, ("regex", "a"), False) for _ in range(2))
    assert compiling.begun.wait(WAIT_SECONDS)
    assert first.cancel()
    assert not compiling.was_cancelled.is_set()
    assert second.cancel()
    assert compiling.was_cancelled.wait(WAIT_SECONDS)
    assert first.cancelled() and second.cancelled()
    later = executor.submit(compiling, ("regex", "a"), False)
    assert later.result(WAIT_SECONDS).process is not None


def test_a_cancelled_job_is_not_begun() -> None:
    executor, busy, waiting = GrammarExecutor(), Compiling(), Compiling()
    futures = [executor.submit(busy, ("regex", str(number)), False) for number in range(2)]
    never = executor.submit(waiting, ("regex", "never"), False)
    never.cancel()
    after = executor.submit(waiting, ("regex", "after"), False)
    busy.may_end.set()
    waiting.may_end.set()
    assert after.result(WAIT_SECONDS).process is not None
    assert all(future.result(WAIT_SECONDS) for future in futures)
    assert waiting.keys == [("regex", "after")]


def test_what_compiling_raises_is_the_futures() -> None:
    def fail(_key: Any, _require_reasoning: bool) -> Grammar:
        raise KeyError("triggers")

    with pytest.raises(KeyError, match="triggers"):
        GrammarExecutor().submit(fail, ("structural_tag", "{}"), False).result(WAIT_SECONDS)


def test_the_least_recently_used_grammars_are_dropped(cache: GrammarCache) -> None:
    for number in range(MAX_KEPT):
        cache["regex", str(number)] = Grammar()
    assert cache.get(("regex", "0")) is not None
    cache["regex", "new"] = Grammar()
    assert cache.get(("regex", "1")) is None
    assert cache.get(("regex", "0")) is not None
    for number in range(2 * MAX_REFUSED):
        cache["json", str(number)] = Grammar(None, "wrong")
    assert len(cache) == MAX_KEPT + MAX_REFUSED
    while cache.evict():
        pass
    assert len(cache) == MAX_REFUSED
    assert cache.get(("json", str(2 * MAX_REFUSED - 1))).error_message == "wrong"


def test_a_grammar_that_was_refused_only_for_now_is_compiled_when_it_is_sent_again(cache: GrammarCache) -> None:
    for reason in ("64 grammars of 900 MiB are in use; try again later", "Grammar preprocessing timed out"):
        cache["regex", "a"] = Grammar(None, reason)
        assert cache.get(("regex", "a")) is None


def test_a_grammar_that_was_too_slow_is_refused_and_one_that_was_lost_is_compiled_again(cache: GrammarCache) -> None:
    cache["regex", "slow"] = Grammar(
        Process(ended=True, failure=Failure("took more time than allowed", is_lasting=True))
    )
    cache["regex", "lost"] = Grammar(Process(ended=True))
    assert cache.get(("regex", "slow")).error_message == "matching it took more time than allowed"
    assert cache.get(("regex", "slow")).process is None
    assert cache.get(("regex", "lost")) is None
    cache.clear()
    assert len(cache) == 0
    assert cache.pop(("regex", "slow"), None) is None
