"""The whole run: the limits, and for each model its checkpoint, its servers and its peers, one after the other."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kt_runtime import __version__
from kt_runtime.bench.gpu.bars import bars
from kt_runtime.bench.gpu.limits import GpuLimits, measure_gpu_limits
from kt_runtime.bench.gpu.models import check_disk, make, shape
from kt_runtime.bench.gpu.needs import ExpertPlace
from kt_runtime.bench.gpu.plan import DTYPE, Plan
from kt_runtime.bench.gpu.rows import Row
from kt_runtime.bench.gpu.servers import Servers, serving_needs
from kt_runtime.bench.gpu.settings import kt_settings, resident_counts, sglang_settings
from kt_runtime.bench.peer_place import CPU
from kt_runtime.bench.serve.fit import check_memory
from kt_runtime.bench.serve.peers import HUGGING_FACE, LLAMA_CPP, ScriptPeer
from kt_runtime.bench.serve.run import measure_script, place_of
from kt_runtime.bench.serve.server_side import Measurements
from kt_runtime.bench.serve.work import model_work
from kt_runtime.cli.interrupts import Say, uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.device import DeviceFacts, accelerator, devices, driver_version, is_host
from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.models.presets import Preset


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Returns the JSON that docs/bench.md describes. Raises InvalidValueError without a GPU, errors in the options, and
    InvalidValueError if memory or disk do not suffice, before anything is made."""
    device = required_accelerator()
    presets = [shape(name, plan.layers) for name in plan.models]
    check_disk(presets, Path(tempfile.gettempdir()), with_gguf=plan.peer is not None)
    for preset in presets:
        serving = plan.serving(preset.name)
        check_memory(serving, serving.cases(preset.config), preset.config, DTYPE)
    return measured_on(device, plan, presets, say)


def required_accelerator() -> torch.device:
    """Raises InvalidValueError if torch sees no GPU."""
    found = accelerator()
    if found is not None:
        return found
    driver = driver_version()
    reason = "no NVIDIA driver is loaded"
    if driver:
        reason = f"driver {driver} is too old for torch {torch.__version__}, or this process may use no device"
    raise InvalidValueError(f"bench gpu measures a GPU, and torch sees none: {reason} (`kt-runtime doctor`)")


def measured_on(device: torch.device, plan: Plan, presets: list[Preset], say: Say) -> dict[str, Any]:
    limits, rows, peers = _limits(device, say), list[Row](), dict[str, Any]()
    for preset in presets:
        with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
            model = _Model(plan, preset, device, say)
            rows += model.rows(Path(root))
            peers[preset.name] = {peer.engine: peer.as_json() for peer in model.peers}
    limits = limits.or_better(_limits(device, say))
    found = [row.as_json(limits) for row in rows]
    return {
        "machine": _machine(device, limits),
        "gpu": _facts(plan, presets),
        "peers": peers,
        "rows": found,
        "bars": [bar.as_json() for preset in presets for bar in bars(preset.name, found)],
    }


class _Model:
    """One model's measurements. `peers`: those that were run."""

    def __init__(self, plan: Plan, preset: Preset, device: torch.device, say: Say) -> None:
        self._plan, self._preset, self._device, self._say = plan, preset, device, say
        self._work = model_work(preset.config, DTYPE)
        self.peers = [ScriptPeer(HUGGING_FACE, Path(sys.executable), say)] if plan.with_hugging_face else []
        self.peers += [ScriptPeer(LLAMA_CPP, plan.peer, say)] if plan.peer is not None else []

    def rows(self, directory: Path) -> list[Row]:
        """`directory`: for the checkpoint and the servers' files."""
        self._say(f"the checkpoint of {self._preset.name}")
        model = make(self._preset, directory / self._preset.name, self._say)
        counts = resident_counts(self._work, self._plan.resident_shares)
        settings = kt_settings(self._work, counts) + (sglang_settings(counts) if self._plan.with_sglang else [])
        servers = Servers(self._plan, self._preset, self._work, self._device, self._say)
        rows: list[Row] = []
        transcripts: Measurements = {}
        for number, setting in enumerate(settings):
            found, measured = servers.rows(setting, model, directory / f"server-{number}")
            rows += found
            transcripts = transcripts or measured
        for peer in self.peers:
            rows += self._peer_rows(peer, model, transcripts, directory)
        return rows

    def _peer_rows(self, peer: ScriptPeer, model: Path, transcripts: Measurements, directory: Path) -> list[Row]:
        """Rows of a peer, which is given the answers of the first server that gave any. Without a limit unless the
        peer computes on the device alone."""
        name, config = self._preset.name, self._preset.config
        place = place_of(peer, config, DTYPE)
        if transcripts:
            measure_script(peer, model, transcripts, DTYPE, directory, place)
        else:
            peer.fail("not measured: no server has answered, whose tokens it would be given")
        is_on_device = peer.engine == HUGGING_FACE and place.device != CPU
        where = f"{place.layers} layers on the device" if peer.engine == LLAMA_CPP else f"on {place.device}"
        rows = []
        for case in self._plan.serving(name).cases(config):
            found = peer.measured.get(case)
            needs = serving_needs(self._work, ExpertPlace("device"), case, self._plan) if is_on_device else None
            problem = None if found else peer.problem
            rates = found.rates if found else ()
            rows.append(Row(name, peer.engine, where, case.kind, case.size, rates, needs, problem=problem))
        return rows


def _limits(device: torch.device, say: Say) -> GpuLimits:
    say("limits of the machine")
    found = measure_gpu_limits(device)
    if not is_host(device):
        torch.accelerator.empty_cache()  # the servers shall have it
    return found


def _machine(device: torch.device, limits: GpuLimits) -> dict[str, Any]:
    cpu, found = cpu_facts(), _current(device)
    facts = {"cpu": cpu["model"], "processors": cpu["usable_processors"], "kt_runtime": __version__}
    facts |= {"gpu": found.name, "gpu_bytes": found.total_bytes, "driver": found.driver, "torch": torch.__version__}
    return facts | {"limits": asdict(limits)}


def _current(device: torch.device) -> DeviceFacts:
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return devices()[index]


def _facts(plan: Plan, presets: list[Preset]) -> dict[str, Any]:
    names = ("prompt_tokens", "new_tokens", "runs", "sequences", "tokens", "microbatch_tokens")
    layers = {preset.name: preset.config["num_hidden_layers"] for preset in presets}
    return {name: getattr(plan, name) for name in names} | {"dtype": DTYPE, "layers": layers}
