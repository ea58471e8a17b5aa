"""Grammars on several ranks: rank 0 compiles and matches them, and the other ranks do what it says.

When a grammar is ready, and whether one is ended, depends on clocks and on the machine: ranks that each had their own
processes would disagree. Here rank 0 alone has grammars' processes. Where SGLang 0.5.23 asks a grammar something, all
ranks ask in the same order, as they form the same batches; rank 0 sends what it was told, in int32:

- is this grammar known (`BaseGrammarBackend.cache`)? MISSED, FOUND or REFUSED
- which queued requests leave the queue (`GrammarManager.get_ready_grammar_requests`)? For each its place among them,
  from 1, and negative if it ends; 0: it waits
- the masks of a step: for each request with a grammar a row of V / 32 words
- is this token accepted, was it taken back? FAILED, or ACCEPTED and TERMINATED, for each request

Symbols: `GrammarManager.get_ready_grammar_requests`, hooked: SGLang's own agreement, by all ranks' pickles over gloo,
takes the requests that are ready on all ranks, but leaves what becomes of a grammar to each. `GrammarManager.__init__`,
hooked, so that rank 0 does not wait for that agreement. The classes here take the places of those of `client.py` and
`queue.py` on ranks (`backend.py`). What a following rank makes of a grammar is made by SGLang's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kt_runtime.errors import RuntimeFault
from kt_runtime.ranks import Exchange
from kt_runtime.sglang_patch.grammar.client import GrammarMatcher
from kt_runtime.sglang_patch.grammar.queue import GrammarCache, Key
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

MANAGER = "sglang.srt.constrained.grammar_manager.GrammarManager"
SYMBOLS = (
    f"{MANAGER}.__init__",
    f"{MANAGER}.get_ready_grammar_requests",
    f"{MANAGER}._apply_request_reasoning_config",
    "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch",
    "sglang.srt.constrained.base_grammar_backend.InvalidGrammarObject",
    "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
)
MISSED, FOUND, REFUSED = range(3)
ACCEPTED, TERMINATED, FAILED = 1, 2, 4  # bits
ON_RANK_0 = "it ends on rank 0, which tells the client why"


def install(hooks: Hooks) -> None:
    hooks.after(SYMBOLS[0], do_not_agree)
    hooks.around(SYMBOLS[1], ready_requests)


def tell(exchange: Exchange, numbers: Sequence[int]) -> None:
    """Sends numbers from rank 0; the other ranks `hear` as many."""
    exchange.rows_of_first(torch.tensor(numbers, dtype=torch.int32).view(-1, 1), len(numbers))


def hear(exchange: Exchange, count: int) -> list[int]:
    return exchange.rows_of_first(torch.empty((0, 1), dtype=torch.int32), count).view(-1).tolist()


def connection() -> Exchange:
    exchange = group.exchange()
    assert exchange is not None
    return exchange


def fill_on_ranks(
    exchange: Exchange, entries: list[Any], vocab_mask: torch.Tensor, fill: Callable[[list[Any], Any], None]
) -> None:
    """`vocab_mask` [B, V / 32], int32: rank 0 fills the rows of `entries` by `fill`, and all ranks have them."""
    rows = [entry.row for entry in entries]
    if not rows:
        return
    if exchange.share.rank == 0:
        fill(entries, vocab_mask)
        exchange.rows_of_first(vocab_mask[rows], len(rows))
    else:
        vocab_mask[rows] = exchange.rows_of_first(vocab_mask[:0], len(rows))


class LeadingMatcher(GrammarMatcher):
    """Rank 0's: it tells the other ranks what became of a token."""

    def accept_token(self, token: int) -> bool:
        return bool(self._telling(lambda: super(LeadingMatcher, self).accept_token(token)))

    def rollback(self, num_tokens: int) -> None:
        self._telling(lambda: super(LeadingMatcher, self).rollback(num_tokens))

    def _telling(self, change: Callable[[], Any]) -> Any:
        try:
            result = change()
        except BaseException:
            tell(connection(), [FAILED])
            raise
        tell(connection(), [ACCEPTED * (result is True) | TERMINATED * self.is_terminated()])
        return result


class FollowingMatcher:
    """The methods of `GrammarMatcher` on the other ranks. `fill_on_ranks` fills their masks."""

    def __init__(self, compiled: FollowedGrammar, **_options: Any) -> None:
        self.compiled, self._terminated = compiled, False

    def accept_token(self, token: int) -> bool:
        """Raises ValueError where it does on rank 0."""
        (state,) = hear(connection(), 1)
        if state & FAILED:
            raise ValueError(f"token {token}: {ON_RANK_0}")
        self._terminated = bool(state & TERMINATED)
        return bool(state & ACCEPTED)

    def rollback(self, num_tokens: int) -> None:
        (state,) = hear(connection(), 1)
        self._terminated = bool(state & TERMINATED)

    def fill_next_token_bitmask(self, bitmask: Any, row: int = 0) -> bool:
        return False

    def is_terminated(self) -> bool:
        return self._terminated

    def find_jump_forward_string(self) -> str:
        return ""


class FollowedGrammar:
    """Stands for a grammar that rank 0 has compiled. `grammar`: its text, which only rank 0 needs."""

    process = None
    grammar = ""
    memory_size_bytes = 0


class FollowingCompiler:
    """The methods of `GrammarCompiler` on the other ranks: they are called once rank 0 has compiled the grammar."""

    def __init__(self, tokenizer_info: Any, **_options: Any) -> None:
        pass

    def compile_json_schema(self, schema: str, **_options: Any) -> FollowedGrammar:
        return FollowedGrammar()

    def compile_builtin_json_grammar(self) -> FollowedGrammar:
        return FollowedGrammar()

    def compile_regex(self, regex: str) -> FollowedGrammar:
        return FollowedGrammar()

    def compile_grammar(self, ebnf: str) -> FollowedGrammar:
        return FollowedGrammar()

    def compile_structural_tag(self, structural_tag: Any) -> FollowedGrammar:
        return FollowedGrammar()

    def clear_cache(self) -> None:
        """Does nothing: this class has no cache."""


class LeadingCache(GrammarCache):
    """Rank 0's: it tells the other ranks what it has found."""

    def get(self, key: Key) -> Any:
        found = super().get(key)
        is_refused = found is not None and self._process_of(found) is None
        tell(connection(), [MISSED if found is None else REFUSED if is_refused else FOUND])
        return found


class FollowingCache:
    """The cache of the other ranks, which finds what rank 0 finds and keeps nothing."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def get(self, key: Key) -> Any:
        from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

        (found,) = hear(connection(), 1)
        if found == MISSED:
            return None
        return InvalidGrammarObject(ON_RANK_0) if found == REFUSED else followed(self._backend, key, False)

    def __setitem__(self, key: Key, grammar: Any) -> None:
        pass

    def pop(self, key: Key, default: Any = None) -> Any:
        return default

    def clear(self) -> None:
        pass


class FollowingExecutor:
    """The queue of the other ranks: its futures stay pending until rank 0 says what becomes of their requests."""

    def submit(self, _compile_grammar: Callable[..., Any], _key: Key, _require_reasoning: bool) -> Future[Any]:
        return Future()


def followed(backend: Any, key: Key, require_reasoning: bool) -> Any:
    """SGLang's object for a grammar that rank 0 has compiled."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    grammar = backend._init_value_dispatch(key, require_reasoning)
    if isinstance(grammar, InvalidGrammarObject):
        raise RuntimeFault(f"rank {group.rank()} refuses a grammar that rank 0 has compiled: {grammar.error_message}")
    return grammar


def do_not_agree(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    if group.num_ranks() > 1:
        manager.grammar_sync_size = 1


def ready_requests(original: Callable[..., list[Any]], manager: Any) -> list[Any]:
    """The requests of the queue that are ready or have failed, in the same order on all ranks."""
    exchange = group.exchange()
    if exchange is None:
        return original(manager)
    queue = list(manager.grammar_queue)
    if exchange.share.rank > 0:
        return follow(manager, queue, hear(exchange, len(queue)))
    returned = original(manager)
    places = {id(req): place for place, req in enumerate(returned, start=1)}
    ends = {id(req) for req in returned if req.to_finish is not None}
    tell(exchange, [places.get(id(req), 0) * (-1 if id(req) in ends else 1) for req in queue])
    return returned


def follow(manager: Any, queue: list[Any], places: list[int]) -> list[Any]:
    """`places`: of each request in the queue, as rank 0 tells them."""
    returned = sorted((place for place in places if place), key=abs)
    requests = {abs(place): req for place, req in zip(places, queue, strict=True) if place}
    for place in returned:
        req = requests[abs(place)]
        if req.finished() or req.grammar is None:  # aborted while it waited, on all ranks
            continue
        if place < 0:
            req.grammar.cancel()
            req.set_finish_with_abort(ON_RANK_0)
        else:
            req.grammar = followed(manager.grammar_backend, req.grammar_key, req.require_reasoning)
            manager._apply_request_reasoning_config(req)
    manager.grammar_queue = [req for place, req in zip(places, queue, strict=True) if not place]
    return [requests[abs(place)] for place in returned]
