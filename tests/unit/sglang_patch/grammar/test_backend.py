"""What a request is answered whose grammar was ended or not compiled, and which masks SGLang asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constrained.base_grammar_backend import GrammarRow
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from kt_runtime.sglang_patch.grammar import client as grammar_client
from kt_runtime.sglang_patch.grammar.backend import ask_for_masks, blame_grammar, fill_together, mark_busy, matcher_of
from kt_runtime.sglang_patch.grammar.client import GrammarMatcher
from kt_runtime.sglang_patch.grammar.step import Failure


class Matcher(GrammarMatcher):
    """Counts what it is asked. `events` is shared, so that the order can be seen."""

    def __init__(self, events: list[Any], failure: Failure | None = None) -> None:
        self.events, self.failure, self.is_at_end = events, failure, False

    def ask_for_mask(self) -> None:
        self.events.append("asked")

    def fill_next_token_bitmask(self, bitmask: Any, row: int = 0) -> bool:
        self.events.append(("filled", row))
        return True

    def is_terminated(self) -> bool:
        return self.is_at_end


def grammar(matcher: Matcher) -> XGrammarGrammar:
    context: Any = SimpleNamespace(process=SimpleNamespace(failure=matcher.failure))
    return XGrammarGrammar(matcher, 8, context, None, "a")


def reasoning(inner: XGrammarGrammar, thinks: bool) -> ReasonerGrammarObject:
    wrapped = ReasonerGrammarObject(inner, [1])
    wrapped.maybe_init_reasoning(thinks)
    return wrapped


def request(grammar: Any, message: str = "") -> Any:
    to_finish = FINISH_ABORT(message, 500, "InternalServerError") if message else None
    return SimpleNamespace(grammar=grammar, to_finish=to_finish, finished=lambda: False)


@pytest.mark.parametrize(
    ("failure", "status"),
    [(Failure("took too much", is_lasting=True), 400), (Failure("did not answer", is_busy=True), 503), (None, 500)],
)
def test_who_is_to_blame_for_a_request_that_ended(failure: Failure | None, status: int) -> None:
    ended = request(grammar(Matcher([], failure)), "Grammar accept_token failed: " + "a" * 100_000)
    blame_grammar(None, None, ended)
    assert ended.to_finish.status_code == status
    assert len(ended.to_finish.message) < 600


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("Failed to compile ebnf grammar: 64 grammars of 900 MiB are in use; try again later", 503),
        ("Grammar preprocessing timed out: req.grammar_key=('ebnf', '" + "a" * 100_000 + "')", 503),
        ("Failed to compile ebnf grammar: compiling it took more time or memory than allowed", 500),
    ],
)
def test_a_grammar_that_found_no_room_is_no_mistake_of_its_client(message: str, status: int) -> None:
    aborted = request(None, message)
    mark_busy([aborted, request(None)])
    assert aborted.to_finish.status_code == status
    assert aborted.to_finish.message.endswith("; try again later") == (status == 503)
    assert len(aborted.to_finish.message) < 600


def test_all_masks_of_a_batch_are_asked_for_before_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def collect(matchers: Any) -> None:
        for matcher in matchers:
            matcher.ask_for_mask()
        events.append("collected")

    monkeypatch.setattr(grammar_client, "collect_masks", collect)
    made: list[Any] = [grammar(Matcher(events)), reasoning(grammar(Matcher(events)), thinks=False)]
    fill_together([GrammarRow(3, made[0]), GrammarRow(5, made[1])], None)
    assert events == ["asked", "asked", "collected", ("filled", 3), ("filled", 5)]


def test_masks_of_the_next_step_are_asked_for_where_there_is_one() -> None:
    events: list[Any] = []
    ended = Matcher(events)
    ended.is_at_end = True
    thinking = reasoning(grammar(Matcher(events)), thinks=True)
    requests = [request(None), request(grammar(ended)), request(thinking), request(grammar(Matcher(events)), "aborted")]
    ask_for_masks(None, None, SimpleNamespace(reqs=requests))
    assert events == []
    ask_for_masks(None, None, SimpleNamespace(reqs=[*requests, request(grammar(Matcher(events)))]))
    assert events == ["asked"]
    assert matcher_of(thinking) is None
