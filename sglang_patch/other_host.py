"""Runs SGLang's ranks of a host other than host 0: no HTTP server, no tokenizer, no detokenizer.

Symbols (SGLang 0.5.23): `Engine._launch_subprocesses`, called with the environment variable
SGLANG_BLOCK_NONZERO_RANK_CHILDREN=0. Reason: without it SGLang's follower opens an HTTP port that answers 200 to
whatever happens, ignores SIGTERM, and waits for its ranks without end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn, Protocol

from kt_runtime.errors import KtError
from kt_runtime.ranks.failures import FAILED, Failure
from kt_runtime.sglang_patch.frontend import processes
from kt_runtime.sglang_patch.frontend.http_server import (
    SET_ENVIRONMENT,
    apply,
    named_failure,
    tell_of_a_death_while_loading,
)
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks.watch import RankWatch

SYMBOLS = (
    "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
    "sglang.srt.entrypoints.engine.init_tokenizer_manager",
    SET_ENVIRONMENT,
)
LAST_SECONDS = 5.0
"""Time for the ranks to end after an end in order, for which host 0's ranks have asked them."""
POLL_SECONDS = 0.5


class OtherHost(Protocol):
    """Implemented by `serve/hosts/other.py`."""

    @property
    def watch(self) -> RankWatch: ...

    @property
    def ended(self) -> threading.Event:
        """Set once host 0 has said that the server ends."""
        ...

    def loaded(self) -> None:
        """This host's ranks have loaded the model."""
        ...

    def leave(self) -> None:
        """A signal asks this host to end. Host 0 is asked to end the server, which sets `ended`."""
        ...

    def failed(self, failure: Failure) -> None:
        """This host has failed. Tells host 0, which says why the server ends; returns after a few seconds."""
        ...

    def refusal(self) -> KtError | None:
        """Why a rank of this host has refused the model's files."""
        ...

    def finish(self) -> int:
        """Says why the server ends, removes temporary files. Returns the exit status."""
        ...


def run(arguments: list[str], host: OtherHost) -> NoReturn:
    """Serves until host 0 ends or a rank fails; then ends this process. `arguments`: SGLang's command line."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ending = _Ending(host)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending.asked)
    threading.Thread(target=ending.wait_for_host_0, name="host-0-ends", daemon=True).start()
    host.watch.start(ending.lost)
    try:
        with named_failure(host.watch):
            _start_ranks(arguments, host)
            host.loaded()
            while True:  # a rank that dies interrupts the main thread (SIGQUIT)
                threading.Event().wait(POLL_SECONDS)
    except Exception as error:  # noqa: BLE001 - whatever it is, the ranks of this host are lost; host 0 hears of it
        refused = host.refusal()
        ending.lost(Failure(str(refused or error), FAILED, 1 if refused is None else refused.exit_status))
    threading.Event().wait()
    raise AssertionError("the process has ended")


def _start_ranks(arguments: list[str], host: OtherHost) -> None:
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import prepare_server_args

    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()

    def install(hooks: Hooks) -> None:
        hooks.after(SET_ENVIRONMENT, tell_of_a_death_while_loading)
        processes.install(hooks, server_args, on_rank=host.watch.add)

    apply(install)
    engine.Engine._launch_subprocesses(
        server_args=server_args,
        init_tokenizer_manager_func=engine.init_tokenizer_manager,
        run_scheduler_process_func=engine.run_scheduler_process,
        run_detokenizer_process_func=engine.run_detokenizer_process,
    )


class _Ending:
    """Every way in which this process ends; the first one counts."""

    def __init__(self, host: OtherHost) -> None:
        self._host = host
        self._num_signals = 0
        self._once = threading.Lock()

    def asked(self, _number: int, _frame: Any) -> None:
        """A signal's handler: host 0 ends the server in order. A second signal ends this host at once."""
        self._num_signals += 1
        if self._num_signals > 1:
            self._end(1)
        threading.Thread(target=self._host.leave, daemon=True).start()

    def wait_for_host_0(self) -> None:
        self._host.ended.wait()
        self._end()

    def lost(self, failure: Failure) -> None:
        self._host.failed(failure)
        self._end()

    def _end(self, status: int | None = None) -> None:
        import psutil
        from sglang.srt.utils import kill_process_tree

        if not self._once.acquire(blocking=False):
            return
        found = self._host.finish()
        if found == 0 and status is None:
            psutil.wait_procs(psutil.Process().children(), timeout=LAST_SECONDS)
        kill_process_tree(os.getpid(), include_parent=False)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(found if status is None else status)
