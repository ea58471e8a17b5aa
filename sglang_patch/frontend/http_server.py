"""Runs SGLang 0.5.23's HTTP server in this process, with kt-runtime's frontend around it.

Symbols and reasons:

- `sglang.srt.entrypoints.http_server.launch_server` is called with kt-runtime's tokenizer manager. `app` gets
  kt-runtime's middleware and routes. Its lifespan is wrapped, so that the names channel uses the server's event loop.
- `execute_warmup_func` of `launch_server` is replaced (`warm_up.py`). Until it returns, `/health` and `/ready` answer
  503.
- `http_server._freeze_gc_after_server_warmup`: hooked. SGLang posts to its own route before it listens, and without the
  API key, because SGLang does not know kt-runtime's key. The hook makes the same call directly.
- `OpenAIServingBase._parse_model_parameter`: hooked. `/v1/models` lists an adapter by its plain name, but SGLang
  silently answers a request with this `model` from the base. Here the plain name selects the adapter, as `base:adapter`
  does. Any other name selects the base, also a name with a colon. `serve/requests/checks/served.py` decides earlier
  which names are served at all.
- `engine._set_envs_and_config`: hooked. It sets SGLang's handler of the signal of a process that dies while the model
  is loaded. That handler ends the whole server without a word. kt-runtime's replaces it before any process starts.
- `FunctionCallParser.ToolCallParserEnum` and `ReasoningParser.DetectorMap` are read: SGLang answers a request that
  names another parser with status 500.

Only the frontend process installs these hooks: the modules are large, and the scheduler does not need them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from kt_runtime.errors import InvalidValueError, RuntimeFault, ServerBusyError
from kt_runtime.ranks.failures import Failure
from kt_runtime.resident import progress
from kt_runtime.sglang_patch.faults import lost_device
from kt_runtime.sglang_patch.frontend import chat_logprobs, processes, tokenizing
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks.processes import Look, first_death
from kt_runtime.sglang_patch.ranks.watch import RankWatch

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kt_runtime.sglang_patch.frontend.manager import AdapterService, FrontendManager
    from kt_runtime.sglang_patch.frontend.registry import VersionedRegistry

logger = logging.getLogger(__name__)

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
FREEZE_GC = f"{HTTP_SERVER}._freeze_gc_after_server_warmup"
PARSE_MODEL = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._parse_model_parameter"
SET_ENVIRONMENT = "sglang.srt.entrypoints.engine._set_envs_and_config"
SYMBOLS = (
    f"{HTTP_SERVER}.app",
    f"{HTTP_SERVER}.launch_server",
    FREEZE_GC,
    PARSE_MODEL,
    SET_ENVIRONMENT,
    "sglang.srt.entrypoints.engine.init_tokenizer_manager",
    processes.ENGINE_PROCESSES,
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.ToolCallParserEnum",
    "sglang.srt.parser.reasoning_parser.ReasoningParser.DetectorMap",
    "sglang.srt.managers.io_struct.GenerateReqInput",
    "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",
    "sglang.srt.managers.io_struct.LoRAUpdateOutput",
    "sglang.srt.managers.io_struct.ShutdownReq",
    "sglang.srt.managers.load_snapshot.shm_path_for",
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.clear_hicache_storage",
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache",
    "sglang.srt.managers.tokenizer_manager.ServerStatus",
    "sglang.srt.managers.tokenizer_manager.SignalHandler",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.handle_loop",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.collect_metrics",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_logprob_style",
    "sglang.srt.lora.lora_registry.LoRARef",
    "sglang.srt.lora.lora_registry.LoRARegistry",
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.server_args.prepare_server_args",
    "sglang.srt.utils.kill_process_tree",
    "sglang.srt.utils.watchdog.SubprocessWatchdog",
)

DRAIN_SECONDS = 10.0  # time for running requests to finish after the first SIGTERM or SIGINT
STOP_SECONDS = 25.0  # after this time the process ends everything that still runs
WARM_UP_POLL_SECONDS = 0.1
REFUSED = 2  # exit status, as of a mistake in the options
LOST_SECONDS = 0.5  # after a rank's failure the event loop has so long for telling the clients
ENGINE_EXIT_SECONDS = 12.0  # the disk tier writes its pending pages (`cache.backend.CLOSING_SECONDS`)


@dataclass
class Engine:
    """The part of SGLang that the rest of the frontend may use, in SGLang's event loop.

    `shared_memory`: the file in which the scheduler states its load. It stays if this process is killed.
    """

    manager: FrontendManager
    shared_memory: Path

    @property
    def registry(self) -> VersionedRegistry:
        registry: VersionedRegistry = self.manager.lora_registry
        return registry

    def num_requests(self) -> int:
        return len(self.manager.rid_to_state)

    def stalled(self) -> str:
        """Why the engine can't answer although its processes live; empty while it works."""
        return self.manager.stalled()

    def set_adapters(self, adapters: AdapterService) -> None:
        self.manager.adapters = adapters

    def pin(self, alias: str, name: str) -> str:
        """`VersionedRegistry.pin`; raises InvalidValueError for an unknown name."""
        try:
            return self.registry.pin(alias, name)
        except ValueError as error:
            raise InvalidValueError(str(error)) from None

    def unpin(self, alias: str) -> None:
        self.registry.unpin(alias)

    async def generate(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Runs one request with the fields of /generate, and returns its answer. A cancelled call aborts the request.

        `fields` has `rid`, a unique id. Raises InvalidValueError for a request that SGLang refuses, ServerBusyError
        where it is overloaded, RuntimeFault where it fails.
        """
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        answer: dict[str, Any] = {}
        try:
            async for latest in self.manager.generate_request(GenerateReqInput(**fields), None):
                answer = latest
        except asyncio.CancelledError:
            self.manager.abort_request(fields["rid"])
            raise
        except HTTPException as error:
            kind = ServerBusyError if error.status_code == 503 else RuntimeFault
            raise kind(str(error.detail)) from None
        except ValueError as error:
            raise InvalidValueError(str(error)) from None
        return answer

    async def flush_memory_tiers(self, wait_s: float) -> bool:
        """Empties the prefix cache's device and host tiers once the scheduler is idle. False after `wait_s` seconds."""
        return bool((await self.manager.flush_cache(timeout_s=wait_s)).success)

    async def clear_disk_tier(self) -> None:
        """Asks the scheduler to clear the tier. Does not wait: some pages may still exist when it returns."""
        await self.manager.clear_hicache_storage()


class Frontend(Protocol):
    """Implemented by `serve/launch.py`."""

    def prepare(self, app: FastAPI) -> None:
        """Adds middleware and routes, before the server starts."""
        ...

    def session(self, app: FastAPI, engine: Engine) -> contextlib.AbstractAsyncContextManager[None]:
        """A context that is entered in the event loop before the first request and left after the last."""
        ...

    def wait_for_resident(self) -> bool:
        """Blocks until the resident answers; False if `stop` was called before. Called in its own thread."""
        ...

    def warming_up(self) -> None:
        """The first tokens are about to be computed."""
        ...

    def refusal(self) -> str:
        """Why the server must not serve, although the model can answer; empty: it may. Called after `warming_up`."""
        ...

    def announce(self) -> None:
        """Called in its own thread when the server can answer requests. Must return soon after `stop`."""
        ...

    def refused(self, why: str) -> None:
        """The server is about to end because of `refusal`."""
        ...

    def failed(self, what: str, status: int = 1) -> None:
        """The server is about to end with `status` because of an internal error `what`. The log has details."""
        ...

    @property
    def watch(self) -> RankWatch | None:
        """The watch of this host's ranks; None for a server of one rank."""
        ...

    def ranks_elsewhere(self) -> Mapping[str, Look]:
        """The ranks of other hosts (`stalls.py`). Called in the event loop."""
        ...

    def stop(self) -> None:
        """The server is about to end. May be called in any thread, more than once."""
        ...

    def clean_up(self) -> None:
        """Removes the server's temporary files. Called last, after all of SGLang's processes have ended."""
        ...


def run(arguments: list[str], frontend: Frontend) -> NoReturn:
    """Serves until SIGTERM or SIGINT, then ends this process. `arguments`: SGLang's command line arguments.

    Raises RuntimeFault if one of SGLang's processes dies while the model loads. No SGLang process outlives this call.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    apply(install)
    server = _Server(frontend)
    with contextlib.ExitStack() as ending:  # runs in reverse order; a failing step does not prevent the next
        ending.callback(frontend.clean_up)
        ending.callback(server.remove_shared_memory)
        ending.callback(kill_process_tree, os.getpid(), include_parent=False, wait_timeout=60)
        ending.callback(server.wait_for_engine)
        ending.callback(frontend.stop)
        with named_failure(frontend.watch):
            server.run(arguments)
    # Cleanup is complete. SGLang's ZMQ contexts and threads could still delay the interpreter's exit by half a minute.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def named_failure(watch: RankWatch | None) -> Iterator[None]:
    """An error in the block, while ranks load the model, becomes one that names the rank at fault, if one is."""
    try:
        yield
    except Exception as error:
        if watch is None:
            raise
        if not watch.claim():  # its thread ends this process
            threading.Event().wait(STOP_SECONDS)
        cause = watch.wait_for_cause()
        if cause is None:
            raise
        if cause.status == REFUSED:
            raise InvalidValueError(cause.why) from error
        raise RuntimeFault(f"{cause.why}; the server ends") from error


def apply(install: Callable[[Hooks], None]) -> None:
    """Patches SGLang in this process."""
    hooks = Hooks.for_this_process()
    install(hooks)
    hooks.apply()


def install(hooks: Hooks) -> None:
    tokenizing.install(hooks)
    chat_logprobs.install(hooks)
    hooks.around(FREEZE_GC, freeze_gc_directly)
    hooks.around(PARSE_MODEL, adapter_by_plain_name)
    hooks.after(SET_ENVIRONMENT, tell_of_a_death_while_loading)


def freeze_gc_directly(_original: Callable[..., None], server_args: Any) -> None:
    """Called in SGLang's warm-up thread."""
    from sglang.srt.entrypoints import http_server

    manager = http_server.get_global_state().tokenizer_manager
    if manager.event_loop is not None:
        asyncio.run_coroutine_threadsafe(manager.freeze_gc(), manager.event_loop)


def tell_of_a_death_while_loading(_result: None, _server_args: Any) -> None:
    signal.signal(signal.SIGQUIT, _engine_died_while_loading)


def adapter_by_plain_name(original: Callable[..., Any], serving: Any, model: str) -> tuple[str, str | None]:
    manager = serving.tokenizer_manager
    base: str = manager.served_model_name
    if model != base and model in manager.lora_registry.names():
        return base, model
    if model.startswith(f"{base}:"):
        found: tuple[str, str | None] = original(serving, model)
        return found
    return base, None


def has_responses(app: FastAPI) -> bool:
    """Whether SGLang could prepare /v1/responses when the server started; it only logs why not."""
    return hasattr(app.state, "openai_serving_responses")


def parser_names() -> tuple[frozenset[str], frozenset[str]]:
    """SGLang's parsers of tool calls and of reasoning."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return frozenset(FunctionCallParser.ToolCallParserEnum), frozenset(ReasoningParser.DetectorMap)


class _Server:
    """One run of SGLang's server, which ends after a signal or because a child process died."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.manager: FrontendManager | None = None
        self._shared_memory: Path | None = None
        self._num_signals = 0
        self._ending: list[Any] = []  # schedulers that were asked to end
        self._failing = threading.Lock()

    def run(self, arguments: list[str]) -> None:
        from sglang.srt.entrypoints import http_server
        from sglang.srt.server_args import prepare_server_args

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end_while_loading)
        server_args = prepare_server_args(arguments)
        server_args.resolve_once()
        watch = self.frontend.watch
        if watch is not None:
            watch.start(self._lost)
        on_rank = None if watch is None else watch.add
        apply(functools.partial(processes.install, server_args=server_args, on_rank=on_rank))
        self.frontend.prepare(http_server.app)
        router = http_server.app.router
        router.lifespan_context = functools.partial(self._lifespan, router.lifespan_context)
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=self._init_manager,
            execute_warmup_func=self._warm_up,
            launch_callback=self.frontend.announce,
        )

    def _init_manager(self, server_args: Any, port_args: Any) -> Any:
        from sglang.srt.entrypoints.engine import init_tokenizer_manager
        from sglang.srt.managers.load_snapshot import shm_path_for

        from kt_runtime.sglang_patch.frontend.manager import FrontendManager

        self._shared_memory = Path(shm_path_for(port_args.instance_id))
        manager, templates = init_tokenizer_manager(server_args, port_args, TokenizerManagerClass=FrontendManager)
        manager.on_stop, manager.on_failure = self._stop, self._fail
        manager.ranks_elsewhere = self.frontend.ranks_elsewhere
        self.manager = manager
        return manager, templates

    @contextlib.asynccontextmanager
    async def _lifespan(self, original: Callable[[Any], Any], app: FastAPI) -> AsyncIterator[Any]:
        assert self.manager is not None and self._shared_memory is not None
        self.manager.auto_create_handle_loop()  # installs the signal handlers of `FrontendSignals`
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop)
        engine = Engine(self.manager, self._shared_memory)
        async with self.frontend.session(app, engine), original(app) as state:
            try:
                yield state
            finally:
                # uvicorn could not listen. SGLang would wait in the event loop for the first request, which needs it.
                if not self._num_signals:
                    self.frontend.failed("another program has taken the server's port while the model was loaded")
                    self._end_now(1)
        self._ask_engine_to_end()

    def _warm_up(self, _server_args: Any) -> bool:
        """Runs in SGLang's warm-up thread while the server starts to listen. False if the server was asked to end."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        from kt_runtime.sglang_patch.frontend.warm_up import warm_up

        assert self.manager is not None
        if not self.frontend.wait_for_resident():
            return False
        self.frontend.warming_up()
        try:
            running = asyncio.run_coroutine_threadsafe(warm_up(self.manager), self.manager.event_loop)
            while not running.done():
                if self._num_signals:
                    running.cancel()
                    return False
                concurrent.futures.wait([running], timeout=WARM_UP_POLL_SECONDS)
            running.result()
            why = self.frontend.refusal()
        except Exception as error:  # any failure means that the model can't answer
            logger.exception("the first request failed")
            self.frontend.failed(f"the model can't answer: {type(error).__name__}: {error}")
            self._end_now(1)
        if why:
            self.frontend.refused(why)
            self._end_now(REFUSED)
        self.manager.server_status = ServerStatus.Up
        assert self.manager.event_loop is not None
        self.manager.event_loop.call_soon_threadsafe(self.manager.watch_for_stalls)
        return True

    def _stop(self) -> None:
        """Runs in the event loop. Stops listening and drains requests; a second signal ends the server immediately."""
        assert self.manager is not None
        self._num_signals += 1
        if self._num_signals > 1:
            self._end_now(1)
        progress.logger.info("stopping: %d requests have %g s to finish", len(self.manager.rid_to_state), DRAIN_SECONDS)
        self.frontend.stop()
        loop = asyncio.get_running_loop()
        loop.call_later(DRAIN_SECONDS, functools.partial(self.manager.abort_request, abort_all=True))
        deadline = threading.Timer(STOP_SECONDS, self._end_now, [1])
        deadline.daemon = True
        deadline.start()
        if self.manager._server_stop_hook is not None:
            self.manager._server_stop_hook()

    def _lost(self, failure: Failure) -> None:
        """In the watch's thread: clients that wait are told why, then the server ends."""
        manager = self.manager
        if manager is not None and manager.event_loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                manager.event_loop.call_soon_threadsafe(manager.end_server, failure.why)
                threading.Event().wait(LOST_SECONDS)
        self._fail(failure.why, failure.status)

    def _fail(self, why: str = "", status: int = 1) -> None:
        """Ends the server, once; any thread may call it."""
        watch, watchdog = self.frontend.watch, None if self.manager is None else self.manager._subprocess_watchdog
        if not why and watch is not None:
            if not watch.claim():
                return
            cause = watch.wait_for_cause()
            why = "" if cause is None else cause.why
        if not self._failing.acquire(blocking=False):
            return
        if watchdog is not None and not why:
            is_lost = lost_device.has_ended(watchdog._processes)
            why = lost_device.MESSAGE if is_lost else first_death(watchdog)
        self.frontend.failed(why or "one of the server's processes has died", status)
        self._end_now(status)

    def _end_now(self, status: int) -> None:
        from sglang.srt.utils import kill_process_tree

        self.frontend.stop()
        self._stop_watchdog()
        kill_process_tree(os.getpid(), include_parent=False)
        self.remove_shared_memory()
        self.frontend.clean_up()
        os._exit(status)

    def _ask_engine_to_end(self) -> None:
        """Asks the scheduler to free the device and close its sockets itself. Must be called in the event loop."""
        import psutil
        from sglang.srt.managers.io_struct import ShutdownReq

        assert self.manager is not None
        self._stop_watchdog()
        if self.frontend.watch is not None:
            self.frontend.watch.claim()
        self._ending = [child for child in psutil.Process().children() if "scheduler" in _title(child)]
        self.manager._dispatch_to_scheduler(ShutdownReq())

    def wait_for_engine(self) -> None:
        import psutil

        psutil.wait_procs(self._ending, timeout=ENGINE_EXIT_SECONDS)

    def remove_shared_memory(self) -> None:
        """Removes the file in which SGLang's scheduler states its load. SGLang itself leaves it behind."""
        if self._shared_memory is not None:
            self._shared_memory.unlink(missing_ok=True)

    def _stop_watchdog(self) -> None:
        if self.manager is not None and self.manager._subprocess_watchdog is not None:
            self.manager._subprocess_watchdog._stop_event.set()


def _title(process: Any) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _end_while_loading(_number: int, _frame: Any) -> None:
    raise SystemExit(0)


def _engine_died_while_loading(_number: int, _frame: Any) -> None:
    raise RuntimeFault("one of the server's processes died while the model was loaded; the log says why")
