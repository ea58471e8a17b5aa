"""Implements the resident's interface `kt_runtime.resident.host.Host` with SGLang's scheduler.

Symbols (SGLang 0.5.23): attributes of `Scheduler` and of its `ModelRunner`, which are only read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.adapters import AdapterTensors
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.host import Decoded
from kt_runtime.resident.pacing.budget import Load
from kt_runtime.resident.pacing.latencies import Latencies
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.sglang_patch.cache import metrics as cache_metrics
from kt_runtime.sglang_patch.cache import namespace as cache_namespace
from kt_runtime.sglang_patch.cpu import routes
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.gpu import hot, streaming
from kt_runtime.sglang_patch.lora import install as lora_install
from kt_runtime.sglang_patch.lora import slots as lora_slots
from kt_runtime.sglang_patch.lora import staging as lora_staging
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.resident import latencies, members
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.sglang_patch.version import PINNED
from kt_runtime.wire.names import NamesChannel
from kt_runtime.wire.status import CacheTier, ExpertStreaming, GpuExperts, RankStatus

SYMBOLS = (
    "sglang.srt.managers.scheduler.Scheduler.chunked_prefill_size",
    "sglang.srt.managers.scheduler.Scheduler.chunked_req",
    "sglang.srt.managers.scheduler.Scheduler.collect_inflight_reqs",
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
    "sglang.srt.managers.scheduler.Scheduler.waiting_queue",
    "sglang.srt.managers.scheduler.Scheduler.running_batch",
    "sglang.srt.managers.scheduler.Scheduler.last_batch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.batch_is_full",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.reqs",
    "sglang.srt.managers.schedule_batch.Req.origin_input_ids",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.forward_mode",
    "sglang.srt.managers.scheduler.Scheduler.tp_worker",
    "sglang.srt.managers.tp_worker.TpModelWorker.model_runner",
    "sglang.srt.model_executor.model_runner.ModelRunner.device",
    "sglang.srt.model_executor.model_runner.ModelRunner.gpu_id",
    "sglang.srt.model_executor.model_runner.ModelRunner.dtype",
    "sglang.srt.model_executor.model_runner.ModelRunner.lora_manager",
    "sglang.srt.model_executor.model_runner.ModelRunner.model",
    "sglang.srt.model_executor.model_runner.ModelRunner.model_config",
)


class SGLangHost:
    """Lives in the scheduler process. The scheduler's thread calls every method except `prepare_adapter`."""

    engine_version = PINNED

    def __init__(self, scheduler: Any, settings: ResidentSettings) -> None:
        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self.num_ranks = group.num_ranks()
        self.exchange, self.hashing_group = group.exchange(), group.hashing_group()
        self.members = members.Members(
            self._runner.model, settings.host_address, partial(cache_metrics.own_disk, scheduler)
        )
        self._asks_frontend = group.rank() == 0
        self._names = NamesChannel(settings.names_address)
        self._to_drop: set[str] = set()
        self._staging = lora_staging.start(self._runner.lora_manager, settings.lora_memory_bytes)
        self.model = settings.model
        self.model_directory = settings.model_directory
        self.config: dict[str, Any] = json.loads((Path(settings.model_directory) / "config.json").read_text())
        self.device = _device(self._runner)
        self.dtype: torch.dtype = self._runner.dtype
        self.max_lora_rank = int(self._runner.lora_manager.max_lora_rank)
        self.context_tokens = int(self._runner.model_config.context_len)
        self.chunked_prefill_tokens = int(scheduler.chunked_prefill_size or 0)
        self.experts = expert_store()
        self.weights = cache_namespace.fingerprint(self._runner)
        self.routes: RouteStore | None = routes.open_store(self.config, settings.route_bytes)
        self.attends_in_float32 = device.is_host(self.device)  # `cpu/attention.py`; elsewhere SGLang's own backends run

    @property
    def step(self) -> str:
        return native_step.state() if device.is_host(self.device) else "the model is not on a CPU"

    @property
    def step_exceptions(self) -> list[str]:
        return native_step.exceptions()

    @property
    def not_exact(self) -> str:
        if device.is_host(self.device):
            return native_step.not_exact()
        return "; ".join(filter(None, ("the model is not on a CPU", hot.not_exact())))

    @property
    def gpu_experts(self) -> GpuExperts | None:
        return hot.status()

    @property
    def expert_streaming(self) -> ExpertStreaming | None:
        return streaming.status()

    @property
    def decoded(self) -> Decoded:
        return native_step.decoded()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return cache_namespace.named_tensors(self._runner.model)

    def load(self) -> Load:
        """A request that waits for a place among the running ones is not counted as waiting: no prefill can begin."""
        scheduler = self._scheduler
        running, last, in_chunks = scheduler.running_batch, scheduler.last_batch, scheduler.chunked_req
        requests = list(running.reqs)
        if last is not None and last is not running and last.forward_mode.is_extend():
            requests += last.reqs  # they join the running ones before the next step
        now = time.perf_counter()
        streams = [latencies.stream(each, now) for each in requests if each is not in_chunks and not each.finished()]
        queued = [] if running.batch_is_full else list(scheduler.waiting_queue)
        decoding = tuple(stream for stream in streams if stream is not None)
        return Load(
            decoding,
            len(queued) + (in_chunks is not None),
            not scheduler.is_fully_idle(),
            max((latencies.waited(each, now) for each in queued), default=0.0),
            sum(len(each.origin_input_ids) for each in queued),
        )

    @property
    def latencies(self) -> Latencies:
        return latencies.measured

    def ranks(self) -> list[RankStatus]:
        return self.members.statuses()

    def reserve_slot(self, num_bytes: int = 0) -> object | None:
        if self.num_ranks > 1:  # threads would fill it at other times on each rank
            return None
        in_use = {None, *self._staging.kept(self._in_use())}
        return lora_slots.reserve(self._runner.lora_manager, in_use, num_bytes=num_bytes)

    def release_slot(self, slot: Any) -> None:
        slot.give_back()

    def prepare_adapter(self, name: str, adapter: AdapterTensors, slot: Any = None) -> object:
        return lora_install.prepare_adapter(self._runner.lora_manager, self.config, name, adapter, slot)

    def place_adapter(self, prepared: Any, slot: Any) -> object:
        return replace(prepared, slot=slot) if slot.fill_at_once(prepared.adapter) else prepared

    def install_adapter(self, lora_id: str, name: str, version: str, prepared: Any) -> None:
        lora_install.install_prepared(self._runner.lora_manager, lora_id, name, version, prepared)

    def drop_adapter(self, lora_id: str) -> None:
        """Drops the adapter now, or after its last request ends: an aborted one may outlive the frontend's count."""
        self._to_drop.add(lora_id)
        self._drop_unused()

    def move_name(self, name: str, version: str, lora_id: str, done: Callable[[Exception | None], None]) -> None:
        if self._asks_frontend:
            self._names.send(name, version, lora_id, done)

    def settle_moves(self, seconds: float) -> None:
        self._names.wait(seconds)
        self._names.poll()

    def wakeups(self) -> list[Any]:
        return [self._names.socket, self._staging.wakeup.fd]

    def poll(self) -> None:
        """Receives the frontend's answers to `move_name`, drops unused adapters, and moves others out of the slots that
        exceed the memory for them. Called once per turn."""
        self._names.poll()
        self._drop_unused()
        self._staging.turn(self._in_use)

    def _drop_unused(self) -> None:
        if not self._to_drop:
            return
        in_use = self._in_use()
        for lora_id in self._to_drop - in_use:
            lora_install.drop_adapter(self._runner.lora_manager, lora_id)
        self._to_drop &= in_use

    def _in_use(self) -> set[str]:
        return lora_install.adapters_in_use(self._scheduler)

    def cache_tiers(self) -> list[CacheTier]:
        return cache_metrics.tiers(self._scheduler)

    def close(self) -> None:
        self.weights.close()
        self._staging.close()
        self._names.close()


def _device(runner: Any) -> torch.device:
    """The model's device. An accelerator has its index: a thread of the resident's may have another current device."""
    kind = torch.device(runner.device)
    return kind if device.is_host(kind) else torch.device(kind.type, runner.gpu_id)
