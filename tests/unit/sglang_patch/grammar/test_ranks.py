"""What following ranks make of grammars that rank 0 alone has: real ranks, real processes of grammars."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from reference.ranks.real_ranks import run_ranks
from sglang.srt.constrained.base_grammar_backend import GrammarRow, InvalidGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from kt_runtime.errors import RuntimeFault
from kt_runtime.ranks import Exchange
from kt_runtime.sglang_patch.grammar import ranks
from kt_runtime.sglang_patch.grammar.backend import fill_here, process_of
from kt_runtime.sglang_patch.grammar.client import GrammarCompiler, GrammarLimits, Room
from kt_runtime.sglang_patch.ranks import group

VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"</s>"]
WORDS = -(-len(VOCABULARY) // 32)
PATIENT = GrammarLimits(compile_wait_s=300.0, match_cpu_s=60.0, step_s=300.0, wait_s=300.0)
"""Other programs may have the processors."""
_COMPILERS: list[Any] = []
"""Of this process, a rank: grammars' processes end with their compiler's."""


def on_ranks(monkeypatch: pytest.MonkeyPatch, work: Callable[[Exchange], Any], num_ranks: int = 2) -> list[Any]:
    def connected(exchange: Exchange) -> Any:
        monkeypatch.setattr(group, "exchange", lambda: exchange)
        monkeypatch.setattr(group, "rank", lambda: exchange.share.rank)
        monkeypatch.setattr(GrammarCompiler, "room", Room(PATIENT))
        return work(exchange)

    return run_ranks(num_ranks, connected, "memory")


def grammars(exchange: Exchange, *patterns: str) -> list[XGrammarGrammar]:
    """As SGLang makes them on this rank."""
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
    leads = exchange.share.rank == 0
    compiler: Any = GrammarCompiler(info) if leads else ranks.FollowingCompiler(info)
    matcher: Any = ranks.LeadingMatcher if leads else ranks.FollowingMatcher
    _COMPILERS.append(compiler)
    compiled = [compiler.compile_regex(pattern) for pattern in patterns]
    return [XGrammarGrammar(matcher(one, max_rollback_tokens=9), 8, one, None, "a") for one in compiled]


def accepted(grammar: XGrammarGrammar, token: bytes) -> str:
    try:
        grammar.accept_token(VOCABULARY.index(token))
    except ValueError:
        return "refused"
    return "ended" if grammar.is_terminated() else "goes on"


def test_masks_tokens_and_ends_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(exchange: Exchange) -> Any:
        found: list[Any] = []
        made = grammars(exchange, "ab", "[a-c]{2}")
        for token in (b"a", b"b", b"</s>"):
            mask = torch.full((3, WORDS), -1, dtype=torch.int32)
            ranks.fill_on_ranks(exchange, [GrammarRow(2, made[0]), GrammarRow(0, made[1])], mask, fill_here)
            found += [mask.tolist(), [accepted(grammar, token) for grammar in made]]
        ranks.fill_on_ranks(exchange, [], mask, fill_here)
        return found

    first, *others = on_ranks(monkeypatch, work, num_ranks=3)
    assert others == [first, first]
    assert first[1::2] == [["goes on"] * 2, ["goes on"] * 2, ["ended"] * 2]
    rows = torch.tensor(first[0])
    assert rows[1].tolist() == [-1] * WORDS, "a request without a grammar may have every token"
    assert rows[2].tolist() != rows[0].tolist() != rows[1].tolist()


@pytest.mark.slow
def test_a_refused_token_a_way_back_and_a_process_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(exchange: Exchange) -> list[str]:
        (grammar,) = grammars(exchange, "ab*")
        found = [accepted(grammar, b"x"), accepted(grammar, b"a"), accepted(grammar, b"</s>")]
        grammar.rollback(1)
        found += [str(grammar.is_terminated()), accepted(grammar, b"b")]
        if exchange.share.rank == 0:
            signal.pidfd_send_signal(grammar.ctx.process._pidfd, signal.SIGKILL)
        return [*found, accepted(grammar, b"b"), accepted(grammar, b"b")]

    expected = ["refused", "goes on", "ended", "False", "goes on", "refused", "refused"]
    assert on_ranks(monkeypatch, work) == [expected, expected]


class Request:
    """The part of SGLang's `Req` that a grammar queue uses."""

    def __init__(self, name: str) -> None:
        self.name, self.grammar, self.grammar_key = name, Future[Any](), ("regex", name)
        self.require_reasoning, self.to_finish = False, None

    def finished(self) -> bool:
        return False

    def set_finish_with_abort(self, message: str) -> None:
        self.grammar, self.to_finish = None, message  # type: ignore[assignment]


def test_requests_leave_the_queue_together_and_in_rank_0s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = object()
    backend = SimpleNamespace(_init_value_dispatch=lambda key, _: (made, key))

    def as_sglang(manager: Any) -> list[Request]:
        """d and a are ready, b is refused, c waits, e was aborted."""
        a, b, c, d, e = manager.grammar_queue
        a.grammar = d.grammar = "compiled"
        b.set_finish_with_abort("Failed to compile")
        manager.grammar_queue = [c]
        return [d, a, e, b]

    def work(exchange: Exchange) -> Any:
        queue = [Request(name) for name in "abcde"]
        queue[4].set_finish_with_abort("Aborted by AbortReq.")
        configured: list[Any] = []
        manager = SimpleNamespace(
            grammar_queue=list(queue), grammar_backend=backend, _apply_request_reasoning_config=configured.append
        )
        waiting = queue[1].grammar
        returned = ranks.ready_requests(as_sglang, manager)
        if exchange.share.rank > 0:
            assert [req.name for req in configured] == ["d", "a"]
            assert waiting.cancelled() and queue[0].grammar == (made, ("regex", "a"))
        names = [req.name for req in returned], [req.name for req in manager.grammar_queue]
        return names, [req.to_finish is not None for req in queue], [req.grammar is None for req in queue]

    first, second = on_ranks(monkeypatch, work)
    assert second == first
    assert first[0] == (["d", "a", "e", "b"], ["c"])
    assert first[1] == first[2] == [False, True, False, False, True]


@pytest.mark.slow
def test_followers_find_in_their_cache_what_rank_0_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(_init_value_dispatch=lambda key, _: ("made of", key))

    def work(exchange: Exchange) -> list[str]:
        (grammar,) = grammars(exchange, "a")
        leads = exchange.share.rank == 0
        cache: Any = ranks.LeadingCache(process_of, InvalidGrammarObject) if leads else ranks.FollowingCache(backend)
        cache["regex", "a"], cache["regex", "("] = grammar, InvalidGrammarObject("is none")
        found = [cache.get(("regex", pattern)) for pattern in ("a", "(", "b")]
        assert leads or found[0] == ("made of", ("regex", "a"))
        return ["refused" if isinstance(each, InvalidGrammarObject) else str(each is not None) for each in found]

    assert on_ranks(monkeypatch, work) == [["True", "refused", "False"]] * 2


def test_a_rank_that_refuses_what_rank_0_has_compiled_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(_init_value_dispatch=lambda *_: InvalidGrammarObject("is none"))
    with pytest.raises(RuntimeFault, match="refuses a grammar that rank 0 has compiled: is none"):
        ranks.followed(backend, ("regex", "a"), False)
