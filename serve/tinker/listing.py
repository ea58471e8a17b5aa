"""Training runs and checkpoints as clients list, inspect and delete them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import NotFoundError, UnknownNameError
from kt_runtime.serve.tinker.checkpoints import (
    SCHEME,
    CheckpointPath,
    CheckpointRecord,
    Checkpoints,
    RunRecord,
    moment,
)
from kt_runtime.serve.tinker.runs import TrainingRun
from kt_runtime.serve.tinker.samplers import Adapters


class Listing:
    """`runs`: those in training, by id; the others are known by their checkpoints."""

    def __init__(self, checkpoints: Checkpoints, runs: Mapping[str, TrainingRun], adapters: Adapters) -> None:
        self._checkpoints, self._runs, self._adapters = checkpoints, runs, adapters

    async def training_runs(self, limit: int, offset: int) -> dict[str, Any]:
        found = await asyncio.to_thread(self._checkpoints.runs)
        stored = {run.run_id for run in found}
        live = [run.record for run in self._runs.values() if run.run_id not in stored]
        runs = sorted([*live, *found], key=lambda run: run.created_at, reverse=True)
        shown = await asyncio.to_thread(lambda: [self._shown(run) for run in runs[offset : offset + limit]])
        return {"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}}

    async def training_run(self, run_id: str) -> dict[str, Any]:
        live = self._runs.get(run_id)
        record = live.record if live is not None else await asyncio.to_thread(self._checkpoints.run, run_id)
        if record is None:
            raise NotFoundError(f"training run {run_id[:100]!r} is not known")
        return await asyncio.to_thread(self._shown, record)

    def _shown(self, run: RunRecord) -> dict[str, Any]:
        """The SDK's `TrainingRun`."""
        saved = self._checkpoints.of_run(run.run_id)
        live = self._runs.get(run.run_id)
        last: dict[str, Any] = {}
        for record in reversed(saved):
            last[record.kind] = record.shown()
        used = live.used_at if live is not None else saved[0].created_at if saved else run.created_at
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": run.rank,
            "last_request_time": moment(used),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }

    async def checkpoints_of(self, run_id: str) -> dict[str, Any]:
        await self.training_run(run_id)
        found = await asyncio.to_thread(self._checkpoints.of_run, run_id)
        return {"checkpoints": [record.shown() for record in found]}

    async def all_checkpoints(self, limit: int, offset: int) -> dict[str, Any]:
        def read() -> list[CheckpointRecord]:
            return [one for run in self._checkpoints.runs() for one in self._checkpoints.of_run(run.run_id)]

        found = sorted(await asyncio.to_thread(read), key=lambda one: one.created_at, reverse=True)
        shown = [record.shown() for record in found[offset : offset + limit]]
        return {"checkpoints": shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> None:
        """The adapter that serves it is unloaded."""
        record = await asyncio.to_thread(
            self._checkpoints.remove, CheckpointPath.parse(f"{SCHEME}{run_id}/{checkpoint_id}")
        )
        if record.adapter is not None:
            with contextlib.suppress(UnknownNameError):
                await self._adapters.unload(record.adapter)

    async def weights_info(self, path: str) -> dict[str, Any]:
        parsed = CheckpointPath.parse(path)
        await asyncio.to_thread(self._checkpoints.find, parsed)
        run = await asyncio.to_thread(self._checkpoints.run, parsed.run_id)
        if run is None:
            raise NotFoundError(f"{path}: its training run is not recorded on this server")
        return {
            "base_model": run.base_model,
            "is_lora": True,
            "lora_rank": run.rank,
            "optimizer_config": {"type": "adamw"},
            "train_unembed": False,
            "train_mlp": run.train_mlp,
            "train_attn": run.train_attn,
        }
