"""xgrammar's part of SGLang 0.5.23's scheduler, with the compiling and matching in processes of their own.

Symbols and reasons:

- `sglang.srt.constrained.xgrammar_backend.GrammarCompiler`, `.GrammarMatcher`: replaced by `grammar_client.py`'s. Both
  run without a bound in the scheduler: a schema of 20,000 properties compiles on after its client has gone and leaves
  gigabytes behind; `(([a-z]*)*)*!` holds every stream up for 8 s for each of its tokens.
- `sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__`: its thread pool and its dict become those
  of `grammar_queue.py`, which end work that nobody waits for and keep a bounded number of grammars.
- `base_grammar_backend.InvalidGrammarObject`, `xgrammar_backend.XGrammarGrammar`: read.
- `SchedulerBatchResultProcessor._accept_grammar_tokens`, `._apply_prefill_grammar` in `sglang.srt.managers`: hooked.
  They end a request whose grammar refuses its token as an error of the server's (500); one that took too much is 400.
- `sglang.srt.constrained.grammar_manager.GrammarManager.__init__`: hooked, to do this in the scheduler only.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

BACKEND = "sglang.srt.constrained.xgrammar_backend"
BASE = "sglang.srt.constrained.base_grammar_backend"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
SYMBOLS = (
    f"{BACKEND}.GrammarCompiler",
    f"{BACKEND}.GrammarMatcher",
    f"{BACKEND}.XGrammarGrammar",
    f"{BASE}.BaseGrammarBackend.__init__",
    f"{BASE}.InvalidGrammarObject",
    "sglang.srt.constrained.grammar_manager.GrammarManager.__init__",
    f"{RESULTS}._accept_grammar_tokens",
    f"{RESULTS}._apply_prefill_grammar",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
)


def install(hooks: Hooks) -> None:
    """Where the scheduler builds its grammar backend: elsewhere nobody needs xgrammar."""
    hooks.before("sglang.srt.constrained.grammar_manager.GrammarManager.__init__", use_processes)
    hooks.after(f"{RESULTS}._accept_grammar_tokens", blame_grammar)
    hooks.after(f"{RESULTS}._apply_prefill_grammar", blame_grammar)


def use_processes(*_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.constrained import base_grammar_backend, xgrammar_backend

    from kt_runtime.sglang_patch import grammar_client

    if xgrammar_backend.GrammarCompiler is grammar_client.GrammarCompiler:
        return
    xgrammar_backend.GrammarCompiler = grammar_client.GrammarCompiler
    xgrammar_backend.GrammarMatcher = grammar_client.GrammarMatcher
    bounded_after_init(base_grammar_backend.BaseGrammarBackend)


def bound_queue_and_cache(backend: Any) -> None:
    """Of two backends, one around the other, the outer one's are used; it is built last."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    from kt_runtime.sglang_patch.grammar_client import GrammarCompiler
    from kt_runtime.sglang_patch.grammar_queue import GrammarCache, GrammarExecutor

    backend.executor = GrammarExecutor()
    backend.cache = GrammarCache(process_of, InvalidGrammarObject)
    GrammarCompiler.room.evict = backend.cache.evict


def blame_grammar(_result: Any, _processor: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """A grammar that took too much was the client's mistake."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    process = process_of(req.grammar)
    if isinstance(req.to_finish, FINISH_ABORT) and process is not None and process.failure:
        req.to_finish.status_code = HTTPStatus.BAD_REQUEST
        req.to_finish.err_type = "BadRequestError"


def process_of(grammar: Any) -> Any:
    """The process of a grammar of SGLang's, also of one within its reasoning wrapper. None where there is none."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    inner = grammar if isinstance(grammar, XGrammarGrammar) else getattr(grammar, "grammar", None)
    return inner.ctx.process if isinstance(inner, XGrammarGrammar) else None


def bounded_after_init(backend_class: Any) -> None:
    original = backend_class.__init__

    def __init__(self: Any) -> None:
        original(self)
        bound_queue_and_cache(self)

    backend_class.__init__ = __init__
