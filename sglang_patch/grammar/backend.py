"""Replaces xgrammar in SGLang 0.5.23's scheduler by classes that compile and match in separate processes.

Symbols and reasons:

- `sglang.srt.constrained.xgrammar_backend.GrammarCompiler`, `.GrammarMatcher`: replaced by the classes of `client.py`.
  SGLang runs both in the scheduler without a limit. A schema of 20,000 properties continues to compile after its client
  has disconnected, and leaks gigabytes. `(([a-z]*)*)*!` blocks every stream for 8 s per token.
- `sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__`: its thread pool and its dict are replaced
  by the classes of `queue.py`, which cancel work without a waiting request and keep a bounded number of grammars.
- `base_grammar_backend.BaseGrammarObject.fill_vocab_mask_batched`: replaced. SGLang waits for the grammars of a batch
  one after the other; the replacement asks all of them before it waits for any (`step.py`).
- `base_grammar_backend.InvalidGrammarObject`, `xgrammar_backend.XGrammarGrammar`: read.
- `SchedulerBatchResultProcessor.process_batch_result_decode`, `.process_batch_result_prefill` in `sglang.srt.managers`:
  hooked. After all tokens of a step are accepted, the next masks are requested, and computed in parallel to the model.
- `SchedulerBatchResultProcessor._accept_grammar_tokens`, `._apply_prefill_grammar`: hooked. SGLang ends a request whose
  grammar refuses its token with a server error (500). The hook answers 400 if the grammar exceeded its limits, and 503
  if the machine was too busy.
- `GrammarManager.get_ready_grammar_requests`: hooked. SGLang answers 400 for a grammar that finds no free process or
  waits too long in the queue; the hook answers 503.
- `sglang.srt.constrained.grammar_manager.GrammarManager.__init__`: hooked, to install all this only in the scheduler.

On several ranks, rank 0 does so, and tells the others (`ranks.py`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from kt_runtime.sglang_patch.grammar.log import shortened
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

BACKEND = "sglang.srt.constrained.xgrammar_backend"
MANAGER = "sglang.srt.constrained.grammar_manager.GrammarManager"
BASE = "sglang.srt.constrained.base_grammar_backend"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SYMBOLS = (
    f"{BACKEND}.GrammarCompiler",
    f"{BACKEND}.GrammarMatcher",
    f"{BACKEND}.XGrammarGrammar",
    f"{BASE}.BaseGrammarBackend.__init__",
    f"{BASE}.BaseGrammarObject.fill_vocab_mask_batched",
    f"{BASE}.InvalidGrammarObject",
    f"{MANAGER}.__init__",
    f"{MANAGER}.get_ready_grammar_requests",
    f"{RESULTS}._accept_grammar_tokens",
    f"{RESULTS}._apply_prefill_grammar",
    f"{RESULTS}.process_batch_result_decode",
    f"{RESULTS}.process_batch_result_prefill",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
)

BUSY = (HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError")
MISTAKE = (HTTPStatus.BAD_REQUEST, "BadRequestError")


def install(hooks: Hooks) -> None:
    """Hooks the creation of the scheduler's grammar backend, because no other process needs xgrammar."""
    hooks.before(f"{MANAGER}.__init__", use_processes)
    hooks.after(f"{MANAGER}.get_ready_grammar_requests", mark_busy)
    hooks.after(f"{RESULTS}._accept_grammar_tokens", blame_grammar)
    hooks.after(f"{RESULTS}._apply_prefill_grammar", blame_grammar)
    hooks.after(f"{RESULTS}.process_batch_result_decode", ask_for_masks)
    hooks.after(f"{RESULTS}.process_batch_result_prefill", ask_for_masks)


def use_processes(*_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.constrained import base_grammar_backend, xgrammar_backend

    from kt_runtime.sglang_patch.grammar import log as grammar_log

    compiler, matcher = classes()
    if xgrammar_backend.GrammarCompiler is compiler:
        return
    xgrammar_backend.GrammarCompiler = compiler
    xgrammar_backend.GrammarMatcher = matcher
    base_grammar_backend.BaseGrammarObject.fill_vocab_mask_batched = staticmethod(fill_together)
    bounded_after_init(base_grammar_backend.BaseGrammarBackend)
    grammar_log.shorten_logs()


def classes() -> tuple[type, type]:
    """This rank's compiler and matcher."""
    from kt_runtime.sglang_patch.grammar import client as grammar_client
    from kt_runtime.sglang_patch.grammar import ranks

    if group.rank() > 0:
        return ranks.FollowingCompiler, ranks.FollowingMatcher
    matcher = ranks.LeadingMatcher if group.num_ranks() > 1 else grammar_client.GrammarMatcher
    return grammar_client.GrammarCompiler, matcher


def bound_queue_and_cache(backend: Any) -> None:
    """Replaces the backend's thread pool and dict. Of two nested backends, the outer one is created last and used."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    from kt_runtime.sglang_patch.grammar import ranks
    from kt_runtime.sglang_patch.grammar.client import GrammarCompiler
    from kt_runtime.sglang_patch.grammar.queue import GrammarCache, GrammarExecutor

    if group.rank() > 0:
        backend.executor, backend.cache = ranks.FollowingExecutor(), ranks.FollowingCache(backend)
        return
    backend.executor = GrammarExecutor()
    kind = ranks.LeadingCache if group.num_ranks() > 1 else GrammarCache
    backend.cache = kind(process_of, InvalidGrammarObject)
    GrammarCompiler.room.evict = backend.cache.evict


def fill_together(entries: list[Any], vocab_mask: Any) -> None:
    """Fills the masks of a batch, on all ranks. `entries`: rows of `vocab_mask` and the grammars that fill them."""
    exchange = group.exchange()
    if exchange is None:
        fill_here(entries, vocab_mask)
    else:
        from kt_runtime.sglang_patch.grammar.ranks import fill_on_ranks

        fill_on_ranks(exchange, entries, vocab_mask, fill_here)


def fill_here(entries: list[Any], vocab_mask: Any) -> None:
    from kt_runtime.sglang_patch.grammar.client import collect_masks

    collect_masks(matcher for entry in entries if (matcher := matcher_of(entry.grammar)) is not None)
    for entry in entries:
        entry.grammar.fill_vocab_mask(vocab_mask, entry.row)


def ask_for_masks(_result: Any, _processor: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Requests the masks of the next step, after a step."""
    for req in batch.reqs:
        if req.grammar is not None and not req.finished() and req.to_finish is None:
            matcher = matcher_of(req.grammar)
            if matcher is not None and not matcher.is_terminated():
                matcher.ask_for_mask()


def matcher_of(grammar: Any) -> Any:
    """The matcher of SGLang's grammar object; also that of a grammar in SGLang's reasoning wrapper, while the wrapper
    applies it. None if there is none."""
    from kt_runtime.sglang_patch.grammar.client import GrammarMatcher

    if hasattr(grammar, "_grammar_active"):
        grammar = grammar.grammar if grammar._grammar_active() else None
    matcher = getattr(grammar, "matcher", None)
    return matcher if isinstance(matcher, GrammarMatcher) else None


def mark_busy(requests: list[Any], *_args: Any, **_kwargs: Any) -> None:
    """Answers 503 instead of 400 to requests whose grammar could not be compiled because of overload."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    from kt_runtime.sglang_patch.grammar.queue import is_for_now
    from kt_runtime.sglang_patch.grammar.step import TRY_LATER

    for req in requests:
        if isinstance(req.to_finish, FINISH_ABORT) and is_for_now(req.to_finish.message):
            req.to_finish.message = f"{shortened(req.to_finish.message.removesuffix(TRY_LATER))}{TRY_LATER}"
            req.to_finish.status_code, req.to_finish.err_type = BUSY


def blame_grammar(_result: Any, _processor: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Answers 400 if the grammar exceeded its limits, 503 if the machine was busy; shortens the message.

    SGLang's message contains the whole grammar.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not isinstance(req.to_finish, FINISH_ABORT):
        return
    req.to_finish.message = shortened(req.to_finish.message)
    process = process_of(req.grammar)
    if process is not None and process.failure is not None:
        status = BUSY if process.failure.is_busy else MISTAKE
        req.to_finish.status_code, req.to_finish.err_type = status


def process_of(grammar: Any) -> Any:
    """The process of SGLang's grammar object, also of a grammar in SGLang's reasoning wrapper. None if it has none."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    inner = grammar if isinstance(grammar, XGrammarGrammar) else getattr(grammar, "grammar", None)
    return inner.ctx.process if isinstance(inner, XGrammarGrammar) else None


def bounded_after_init(backend_class: Any) -> None:
    original = backend_class.__init__

    def __init__(self: Any) -> None:
        original(self)
        bound_queue_and_cache(self)

    backend_class.__init__ = __init__
