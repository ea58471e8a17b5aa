"""`kt-runtime serve`: starts the server from its options, and removes its temporary files when the server ends.

Options, port, model, memory and sockets are checked before the model is loaded, and several hosts agree. SGLang's HTTP
server then runs in this process and starts SGLang's scheduler process, which contains the resident. A host other than
host 0 starts its ranks only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kt_runtime.errors import InvalidValueError, KtError, NotFoundError
from kt_runtime.families.quantization import QUANTIZED_WHILE_LOADING, quantization_of
from kt_runtime.files import exclusive_lock
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.serve import devices
from kt_runtime.serve.adapter_directory import adapter_directory, check_adapters, claimed_adapters
from kt_runtime.serve.cache_directory import cache_directory, check_directory, claimed
from kt_runtime.serve.console.console import Console, opened_console
from kt_runtime.serve.console.start_lines import describe_model
from kt_runtime.serve.environment import dropped_variables
from kt_runtime.serve.exactness import check_exact, not_exact
from kt_runtime.serve.finetuning.directory import OFF, claimed_finetuning
from kt_runtime.serve.guarded import guarded
from kt_runtime.serve.hosts.place import host_place
from kt_runtime.serve.http.auth import ApiKey
from kt_runtime.serve.http.front_door import FrontDoor, check_reach, client_keys
from kt_runtime.serve.memory.cache import describe, lack_of_room, plan_cache
from kt_runtime.serve.memory.gpu_experts import (
    check_gpu_experts,
    check_only_on_cpu,
    check_stream_experts,
    only_on_cpu,
)
from kt_runtime.serve.memory.machine import HOST, has_gpu
from kt_runtime.serve.memory.placement import module_names, read_placement
from kt_runtime.serve.memory.plan import check_fits, describe_need, expert_formats
from kt_runtime.serve.memory.routes import check_routing_replay
from kt_runtime.serve.memory.server import (
    plan_server,
    rank_lora_bytes,
    session_memory_bytes,
    with_lora_rank,
    with_lora_slots,
    with_microbatch,
)
from kt_runtime.serve.metrics_directory import metrics_directory
from kt_runtime.serve.metrics_directory import remove as remove_metrics
from kt_runtime.serve.models.presets import is_preset, load_preset
from kt_runtime.serve.models.report import ResolvedModel, resolve_model
from kt_runtime.serve.options.cache_plan import CachePlan
from kt_runtime.serve.options.named import LORA_RANKS, ServeOptions, check_port_is_free, own_option_names
from kt_runtime.serve.options.parsers import NONE, parsers_for
from kt_runtime.serve.options.sglang import check_chunks, check_passed_on
from kt_runtime.serve.ranks import check_ranks
from kt_runtime.serve.registry.joining import Joining, joining
from kt_runtime.sglang_patch.options import last_value
from kt_runtime.sglang_patch.ranks.meeting import VARIABLE as RANKS_MEET
from kt_runtime.wire import ResidentClient, runtime_directory
from kt_runtime.wire.address import ipc_path, private_directory

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kt_runtime.serve.hosts.gathering import Gathered
    from kt_runtime.sglang_patch.frontend.http_server import Engine
    from kt_runtime.sglang_patch.ranks.processes import Look
    from kt_runtime.sglang_patch.ranks.watch import RankWatch

logger = logging.getLogger(__name__)

KEY_VARIABLE = "KT_RUNTIME_API_KEY"
POLL_SECONDS = 0.2
RESIDENT_SECONDS = 60.0


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Runs the server, and ends this process when the server is stopped. `say` prints the lines for the user.

    Raises errors in the options, the model or this machine before anything is loaded, and RuntimeFault when one of
    SGLang's processes dies during loading.
    """
    key = _take_key(options.api_key)
    for note in dropped_variables(os.environ):
        say(note)
    place = host_place(options)
    has_http = place is None or place.number == 0
    if has_http:
        check_port_is_free(options.host, options.port)  # also checks that --host is an address of this machine
        check_reach(options)
    client_keys(options, key)
    check_passed_on(options.passed_on, own=own_option_names(), with_tiers=options.asks_for_cache)
    options = _with_device(options, say)
    model = _resolve(options)
    check_ranks(options, model.config)
    check_exact(options, model.config)
    asked, options = options, _with_parsers(_placed(options, model, say), model)
    check_only_on_cpu(options, model.config)
    if only_on_cpu(model.config):
        options = dataclasses.replace(options, stream_experts="off")
    check_gpu_experts(options, model.config, with_gpu=has_gpu())
    check_stream_experts(options, with_gpu=has_gpu())
    tier = cache_directory(options.cache_dir, model.directory, options.tp_size) if options.cache_disk_bytes else None
    options = _with_cache(options, model.config, tier)
    options = with_lora_slots(with_lora_rank(options, model.config, model.name), model.config)
    if options.max_lora_rank < LORA_RANKS[0] and asked.lora_rank_may_be_lower:
        say(f"adapters up to rank {options.max_lora_rank}: there is no memory for more; --max-lora-rank asks for one")
    check_routing_replay(options, model.config, with_gpu=has_gpu())
    options = with_microbatch(options, model.config, model.name)
    if options.microbatch_tokens < asked.microbatch_tokens:
        say(
            f"training computes {options.microbatch_tokens} tokens at once, not {asked.microbatch_tokens}: "
            "there is no memory for more (--microbatch-tokens)"
        )
    memory = plan_server(options, model.config, model.name)
    check_fits(*memory)
    if has_gpu() and options.streaming == "auto" and not memory[0].ring_chunk_experts:
        say("experts do not stream to the GPU: it has no memory for them (--stream-experts off)")
        options = dataclasses.replace(options, stream_experts="off")
    if options.session_memory_bytes is None:
        options = dataclasses.replace(options, session_memory_bytes=session_memory_bytes(*memory))
    directory = private_directory(options.runtime_dir) if options.runtime_dir else runtime_directory()
    with contextlib.ExitStack() as held:
        lock = f"serve-{options.port}{'' if has_http else f'-host-{options.node_rank}'}.lock"
        held.enter_context(exclusive_lock(directory / lock, f"a server's place for port {options.port}"))
        if options.cache is not None:
            _prepare_cache(options, options.cache, _longest_tokens(options, model.config), directory, held, say)
        adapters = adapter_directory(options.adapter_dir, model.directory)
        if has_http:
            held.enter_context(claimed_adapters(adapters, directory))
            for note in check_adapters(adapters):
                say(note)
        from kt_runtime.serve.hosts.gathering import gathered  # imports torch

        jobs = options.finetuning_dir if has_http else OFF
        finetuning = held.enter_context(claimed_finetuning(jobs, adapters, say))
        ranks = held.enter_context(gathered(options, place, model, adapters, say, finetuning))
        registry = joining(options, model.name, model.config, adapters, say) if has_http else None
        settings = _settings(options, model, directory, adapters, memory[0].ring_chunk_experts, ranks.address)
        os.environ.update(settings.to_environment())
        os.environ[RANKS_MEET] = ranks.environment.pop(RANKS_MEET)
        for name, value in (settings_before_imports(has_gpu()) | ranks.environment).items():
            os.environ.setdefault(name, value)
        # SGLang's metrics would include files that another program or an earlier server left in this directory.
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        if (metrics := held.enter_context(metrics_directory())) is not None:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        sglang_arguments = _sglang_arguments(options, model)
        for line in describe_model(options, model, *memory):
            say(line)
        log_level = last_value(options.passed_on, "--log-level") or "info"
        log = f"{options.port}{'' if has_http else f'-host-{options.node_rank}'}"
        console = held.enter_context(opened_console(say, directory, log, log_level, verbose=options.verbose))
        console.say("starting SGLang's processes, which takes half a minute")
        if not has_http:
            _run_other_host(sglang_arguments, ranks, options, settings, directory, console)
        ours = _Frontend(options, model, settings, key, directory, console, finetuning, registry, ranks)
        _run(sglang_arguments, ours)


def settings_before_imports(with_gpu: bool) -> dict[str, str]:
    """Environment variables that torch and SGLang read while they are imported. SGLang's processes inherit them.

    Threads that spin while they wait take cores from the trainer, the tokenizer and the expert pool: with two other
    busy processes a decode step took 550 ms instead of 20. Threads still spin for about 0.1 ms before they sleep: a
    training step has 20,000 waits, most of them shorter, and takes an eighth longer without the spinning.

    Without a GPU nothing is compiled by TorchInductor. It would run g++ for 5 to 20 s at the first request, again for
    each new kind of batch, and fail where there is no compiler.

    A connection stays open for a minute between two requests. Clients close theirs after 5 s (httpx, and so OpenAI's),
    which is SGLang's default, too: where the server is first, it resets a connection on which a request is coming.
    """
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "4000", "SGLANG_TIMEOUT_KEEP_ALIVE": "60"}
    return waiting if with_gpu else {**waiting, "TORCHDYNAMO_DISABLE": "1"}


def _run(sglang_arguments: list[str], ours: _Frontend) -> None:
    from kt_runtime.sglang_patch.faults import refused_model
    from kt_runtime.sglang_patch.frontend import http_server as frontend

    refused_model.forget(ours.wire_address)
    try:
        frontend.run(sglang_arguments, ours)
    except Exception:  # SGLang's or ours: a process has died
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # which says so once more
        refused = refused_model.refusal(ours.wire_address)
        if refused is not None:
            raise refused from None
        raise


def _run_other_host(
    arguments: list[str],
    ranks: Gathered,
    options: ServeOptions,
    settings: ResidentSettings,
    directory: Path,
    console: Console,
) -> NoReturn:
    from kt_runtime.serve.hosts.other import ServingHost
    from kt_runtime.sglang_patch import other_host

    scratch = directory / f"sglang-{options.port}-host-{options.node_rank}"
    other_host.run(arguments, ServingHost(ranks, options.node_rank, scratch, settings.wire_address, console))


def _sglang_arguments(options: ServeOptions, model: ResolvedModel) -> list[str]:
    """Imports SGLang, which takes seconds. Raises InvalidValueError for a value that SGLang refuses."""
    from kt_runtime.sglang_patch import arguments

    if options.passed_on or {options.tool_call_parser, options.reasoning_parser} != {NONE}:
        arguments.check_given(options)
    return arguments.server_arguments(options, model)


class _Frontend:
    """kt-runtime's side of SGLang's HTTP server; implements `sglang_patch.frontend.Frontend`."""

    def __init__(
        self,
        options: ServeOptions,
        model: ResolvedModel,
        settings: ResidentSettings,
        key: ApiKey | None,
        directory: Path,
        console: Console,
        finetuning: Path | None,
        registry: Joining | None = None,
        ranks: Gathered | None = None,
    ) -> None:
        self._ranks = ranks
        self._options, self._model, self._settings, self._console = options, model, settings, console
        self._finetuning, self._registry = finetuning, registry
        self._trainers_key = None if key is None else secrets.token_urlsafe(32)
        own_key = None if self._trainers_key is None else ApiKey(self._trainers_key)
        self._door = FrontDoor(options, model.name, key, _longest_tokens(options, model.config), own_key)
        self._stopping = threading.Event()
        self._scratch = directory / f"sglang-{options.port}"
        shutil.rmtree(self._scratch, ignore_errors=True)  # left by a killed server; the lock proves that it ended
        # SGLang creates its sockets with `tempfile`; in a private directory no other user can reach them.
        tempfile.tempdir = str(private_directory(self._scratch))

    @property
    def wire_address(self) -> str:
        return self._settings.wire_address

    @property
    def watch(self) -> RankWatch | None:
        return None if self._ranks is None else self._ranks.watch

    def ranks_elsewhere(self) -> Mapping[str, Look]:
        return {} if self._ranks is None else self._ranks.elsewhere()

    def prepare(self, app: FastAPI) -> None:
        self._door.prepare(app)

    @contextlib.asynccontextmanager
    async def session(self, app: FastAPI, engine: Engine) -> AsyncIterator[None]:
        from kt_runtime.serve.finetuning.mount import finetuning_api
        from kt_runtime.serve.finetuning.recipe import ServerFacts
        from kt_runtime.serve.finetuning.trainer import Connection
        from kt_runtime.serve.http.adapters import Adapters, drop_adapter
        from kt_runtime.serve.http.cache_clearing import CacheClearing
        from kt_runtime.serve.http.names import NamesServer
        from kt_runtime.serve.http.routes import adapter_routes, cache_routes, registry_routes, settings_routes
        from kt_runtime.serve.http.settings import RunningSettings
        from kt_runtime.serve.registry.mount import replica_of
        from kt_runtime.serve.tinker.mount import tinker_api
        from kt_runtime.wire.async_client import AsyncResidentClient

        resident = AsyncResidentClient(self._settings.wire_address)
        try:
            drop = partial(drop_adapter, resident)
            self._door.serves(engine.registry.names)
            self._door.stalled = engine.stalled
            reserved = self._door.models.reserved
            async with NamesServer(self._settings.names_address, engine.registry, drop, reserved) as names:
                stored, has_hosts = self._settings.adapter_directory, self._options.nnodes > 1
                adapters = Adapters(resident, names, engine.num_requests, stored, has_hosts=has_hosts)
                engine.set_adapters(adapters)
                app.include_router(adapter_routes(adapters))
                app.include_router(cache_routes(CacheClearing(adapters.status, engine)))
                app.include_router(settings_routes(RunningSettings(resident)))
                app.include_router(registry_routes(adapters))
                context_tokens = _longest_tokens(self._options, self._model.config)
                place = Path(self._settings.adapter_directory)
                connection = Connection(self._options.url, self._trainers_key)
                facts = ServerFacts(self._model.directory, self._options.max_lora_rank, context_tokens)
                async with (
                    guarded(engine.shared_memory),
                    replica_of(self._registry, adapters, names, place, self._door),
                    tinker_api(app, resident, engine, adapters, self._options, self._model, context_tokens, place),
                    finetuning_api(
                        app, resident, adapters, self._door.models, facts, connection, place, self._finetuning
                    ),
                ):
                    yield
        finally:
            resident.close()

    def wait_for_resident(self) -> bool:
        while not self._stopping.is_set() and not self._resident_answers():
            self._stopping.wait(POLL_SECONDS)
        return not self._stopping.is_set()

    def warming_up(self) -> None:
        self._console.say("the model is loaded; computing its first tokens")

    def refusal(self) -> str:
        """With `--exact`: why training's log-probabilities may differ from served ones."""
        if not self._options.exact:
            return ""
        with ResidentClient(self._settings.wire_address, timeout_s=RESIDENT_SECONDS) as client:
            return client.status(wait_s=0).not_exact

    def refused(self, why: str) -> None:
        self._console.say(f"Error: {not_exact(why)}")

    def announce(self) -> None:
        """Waits for the port and for the adapters of an earlier run, then prints that the server is ready."""
        host, port = self._options.url.rpartition(":")[0].partition("://")[2].strip("[]"), self._options.port
        while not self._stopping.is_set() and not _listens(host, port):
            self._stopping.wait(POLL_SECONDS)
        while not self._stopping.is_set() and not self._resident_answers(restored=True):
            self._stopping.wait(POLL_SECONDS)
        if not self._stopping.is_set():
            url = self._options.url
            self._console.say(
                f"kt-runtime is ready: {url}, model {self._model.name} ({self._model.directory}), after "
                f"{self._console.seconds:.0f} s; adapters: {url}/kt/adapters, status: {url}/kt/status"
            )

    def failed(self, what: str, status: int = 1) -> None:
        self._console.show_tail()
        self._console.say(f"kt-runtime: {what}; the server ends")
        if self._ranks is not None:
            self._ranks.end([f"{what}; the server ends"], status)

    def stop(self) -> None:
        self._stopping.set()

    def clean_up(self) -> None:
        for address in (self._settings.wire_address, self._settings.names_address):
            ipc_path(address).unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if (metrics := os.environ.get("PROMETHEUS_MULTIPROC_DIR")) is not None:
            remove_metrics(Path(metrics))
        if self._ranks is not None:
            self._ranks.end([], 0)
        self._console.end()

    def _resident_answers(self, *, restored: bool = False) -> bool:
        """Whether the resident answers. `restored`: and whether it serves the adapters of an earlier run again."""
        try:
            with ResidentClient(self._settings.wire_address, timeout_s=RESIDENT_SECONDS) as client:
                return not (client.status(wait_s=0).restoring and restored)
        except KtError as error:
            logger.debug("the resident does not answer yet: %s", error)
            return False


def _take_key(key: str | None) -> ApiKey | None:
    """Removes the key from the environment, which SGLang's processes inherit, and from `sys.argv`, which SGLang may
    dump."""
    os.environ.pop(KEY_VARIABLE, None)
    if key is None:
        return None
    sys.argv[:] = [argument.replace(key, "***") if key else argument for argument in sys.argv]
    return ApiKey(key)


def _settings(
    options: ServeOptions,
    model: ResolvedModel,
    directory: Path,
    adapters: Path,
    ring_chunk_experts: int,
    host_address: str = "",
) -> ResidentSettings:
    sockets = f"{options.port}{f'-host-{options.node_rank}' if options.node_rank else ''}"
    settings = ResidentSettings(
        host_address=host_address,
        model=model.name,
        model_directory=str(model.directory),
        wire_address=f"ipc://{directory / f'resident-{sockets}.sock'}",
        names_address=f"ipc://{directory / f'names-{sockets}.sock'}",
        adapter_directory=str(adapters),
        stores_at_once=options.registry is not None,
        max_adapters=options.max_adapters,
        max_adapter_disk_bytes=options.max_adapter_disk_bytes,
        expert_isa=options.expert_isa,
        expert_threads=options.expert_threads,
        expert_format=options.expert_format,
        step=not options.no_step,
        route_bytes=options.routing_replay_bytes,
        train_share=options.train_share,
        tpot_target_ms=options.tpot_target_ms,
        ttft_target_ms=options.ttft_target_ms,
        microbatch_tokens=options.microbatch_tokens,
        max_sessions=options.max_sessions,
        session_memory_bytes=options.session_memory_bytes,
        lora_memory_bytes=rank_lora_bytes(options),
        gpu_expert_bytes=options.gpu_experts_bytes,
        gpu_expert_format=options.gpu_experts_format,
        pinned_experts=dict(options.pinned_experts),
        ring_chunk_experts=ring_chunk_experts,
        stream_experts=options.streaming,
        **_cache_settings(options.cache),
    )
    for address in (settings.wire_address, settings.names_address):
        ipc_path(address)
    return settings


def _cache_settings(cache: CachePlan | None) -> dict[str, Any]:
    if cache is None:
        return {}
    return {
        "cache_directory": None if cache.directory is None else str(cache.directory),
        "cache_disk_bytes": cache.rank_disk_bytes,
        "cache_page_tokens": cache.page_tokens,
        "cache_read_only": cache.read_only,
    }


def _with_parsers(options: ServeOptions, model: ResolvedModel) -> ServeOptions:
    """The options with the model's parsers, unless the user has named others."""
    found = parsers_for(model.config, model.directory, model.preset, options.passed_on)
    return dataclasses.replace(
        options,
        tool_call_parser=options.tool_call_parser or found.tool_call or NONE,
        reasoning_parser=options.reasoning_parser or found.reasoning or NONE,
    )


def _with_cache(options: ServeOptions, config: Mapping[str, Any], directory: Path | None) -> ServeOptions:
    """The options with the prefix cache's plan, which also sets `max_total_tokens`, the size of the KV cache."""
    plan = plan_cache(options, config, directory)
    if plan is None:
        return options
    check_chunks(options.passed_on, plan.page_tokens)
    return dataclasses.replace(options, cache=plan, max_total_tokens=plan.device_tokens)


def _longest_tokens(options: ServeOptions, config: Mapping[str, Any]) -> int:
    return options.context_tokens or int(config.get("max_position_embeddings") or options.max_total_tokens)


def _prepare_cache(
    options: ServeOptions,
    cache: CachePlan,
    longest_tokens: int,
    runtime: Path,
    held: contextlib.ExitStack,
    say: Callable[[str], None],
) -> None:
    """Locks the disk tier's directory until `held` closes. Raises the errors of `claimed` and `check_directory`."""
    say(describe(cache))
    if note := lack_of_room(cache, longest_tokens):
        say(note)
    if cache.directory is None:
        return
    if not cache.read_only:
        held.enter_context(claimed(cache.directory, runtime))
    first = options.node_rank * cache.ranks
    for note in check_directory(
        cache.directory,
        cache.disk_bytes,
        read_only=cache.read_only,
        ranks=range(first, first + cache.ranks),
        num_ranks=options.tp_size,
    ):
        say(note)


def _placed(options: ServeOptions, model: ResolvedModel, say: Callable[[str], None]) -> ServeOptions:
    """The options with the expert format and the pinned experts of `--placement`. Raises InvalidValueError for a file
    that does not fit the model or that contradicts `--expert-format`."""
    if options.placement is None:
        return options
    num_gpus = devices.count()
    placement = read_placement(options.placement, module_names(model.config), num_gpus or None)
    for note in placement.notes:
        say(note)
    if placement.num_devices and not num_gpus:
        say(f"{options.placement}: places modules on a GPU: this server has none, and all of them are on the CPU")
    options = dataclasses.replace(options, pinned_experts=placement.pinned_experts)
    wanted, given = placement.expert_format, options.expert_format
    if wanted is None:
        return options
    if given is not None and given != wanted:
        raise InvalidValueError(
            f"--expert-format {given}: {options.placement} asks for {wanted} experts; leave one of the two out"
        )
    # bf16 is no quantization target: unquantized checkpoints are in bf16, and quantized ones can't provide it.
    if wanted not in QUANTIZED_WHILE_LOADING:
        if quantization_of(model.config) is not None:
            say(f"{options.placement}: asks for {wanted} experts: they stay as the checkpoint has them")
        return options
    try:
        expert_formats(model.config, wanted)
    except InvalidValueError as error:
        raise InvalidValueError(f"{options.placement}: asks for {wanted} experts: {error}") from None
    return dataclasses.replace(options, expert_format=wanted)


def _with_device(options: ServeOptions, say: Callable[[str], None]) -> ServeOptions:
    """The options with the device that this machine has for them. Raises the errors of `chosen_device`."""
    chosen = devices.chosen_device(options.device)
    for line in devices.describe(chosen, options.device):
        say(line)
    if options.device == HOST or devices.gpus_are_hidden():
        devices.use_host_only()
    return dataclasses.replace(options, device=chosen)


def _resolve(options: ServeOptions) -> ResolvedModel:
    """Finds the model. The NotFoundError of a preset includes its memory need, which helps before a download."""
    try:
        model = resolve_model(options.model)
        return dataclasses.replace(model, name=options.served_model_name or model.name)
    except NotFoundError as error:
        if not is_preset(options.model):
            raise
        preset = load_preset(options.model)
        planned = with_lora_rank(_with_cache(options, preset.config, None), preset.config, preset.name)
        need = describe_need(*plan_server(planned, preset.config, preset.name))
        raise NotFoundError(f"{error}; {need}") from None


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True
