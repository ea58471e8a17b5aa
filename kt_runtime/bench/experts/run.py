"""The whole run: the machine, then each shape and format; all memory is freed before the next one."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from kt_runtime import __version__
from kt_runtime.bench.experts.checkpoint import prefix, write_checkpoint
from kt_runtime.bench.experts.layer_case import LayerCase, Weights
from kt_runtime.bench.experts.limits import Limits, last_level_cache_bytes, measure_limits, memory_reader
from kt_runtime.bench.experts.measurement import Row
from kt_runtime.bench.experts.memory import PeakMemory, check_disk, check_memory
from kt_runtime.bench.experts.peers import KtKernelPeer, TorchPeers
from kt_runtime.bench.experts.plan import BenchFormat, BenchShape, Plan
from kt_runtime.bench.experts.store_bench import StoreBench
from kt_runtime.cli.interrupts import Say, uninterrupted
from kt_runtime.cli.machine import cpu_facts
from kt_runtime.experts import ExpertShape, ExpertStore


class Checkpoints:
    """Checkpoints of one shape, each written at its first use."""

    def __init__(self, root: Path, weights: Weights) -> None:
        self._root, self._weights = root, weights

    def get(self, encoding: str) -> Path:
        directory = self._root / encoding
        if not directory.exists():
            directory.mkdir()
            write_checkpoint(directory, encoding, self._weights)
        return directory


class Run:
    def __init__(self, plan: Plan, say: Say) -> None:
        self._plan, self._say = plan, say
        self._kt_kernel = KtKernelPeer(plan.peer, plan.patience) if plan.peer is not None else None
        self._torch = TorchPeers(plan.patience) if plan.with_torch else None
        self._rows: list[Row] = []
        self._loads: list[dict[str, Any]] = []

    def result(self) -> dict[str, Any]:
        """The JSON of docs/bench.md. Raises InvalidValueError before any measurement if a shape does not fit."""
        for shape in self._plan.shapes:
            check_memory(shape, self._kt_kernel is not None)
            check_disk(shape, self._plan.formats)
        self._reader = memory_reader()
        limits = self._measure_limits()
        for shape in self._plan.shapes:
            self._measure_shape(shape)
        # Measured again, since the machine's other load varies: a limit is the best measured value.
        limits = _merged(limits, self._measure_limits())
        return {
            "machine": self._machine(limits),
            "peers": {peer: facts.facts() for peer, facts in self._peers().items()},
            "loads": self._loads,
            "rows": [row.as_json(limits[row.isa, row.threads]) for row in self._rows],
        }

    def _peers(self) -> dict[str, TorchPeers | KtKernelPeer]:
        peers = {"torch": self._torch, "kt_kernel": self._kt_kernel}
        return {name: peer for name, peer in peers.items() if peer is not None}

    def _measure_limits(self) -> dict[tuple[str, int], Limits]:
        self._say("limits of the machine")
        return {
            (isa, threads): measure_limits(isa, threads, self._reader)
            for isa in self._plan.isas
            for threads in self._plan.threads
        }

    def _machine(self, limits: dict[tuple[str, int], Limits]) -> dict[str, Any]:
        """The machine's facts; the top-level limits are those of the first instruction set with the most threads."""
        top = limits[self._plan.isas[0], max(self._plan.threads)]
        cpu = cpu_facts()
        return dataclasses.asdict(top) | {
            "cpu": cpu["model"],
            "processors": cpu["usable_processors"],
            "last_level_cache_bytes": last_level_cache_bytes(),
            "kt_runtime": __version__,
            "by_threads": [dataclasses.asdict(each) for each in limits.values()],
        }

    def _measure_shape(self, shape: BenchShape) -> None:
        self._say(f"{shape.name}: making weights")
        case = LayerCase(shape)
        with uninterrupted() as acting, tempfile.TemporaryDirectory(prefix="kt-runtime-bench-") as root, acting():
            checkpoints = Checkpoints(Path(root), case.weights)
            for form in self._plan.formats:
                rows = self._measure_format(case, form, checkpoints.get(form.encoding))
                self._rows += rows
                if self._torch is not None:
                    self._say(f"{shape.name} {form.name}: torch")
                    self._torch.add(case, rows, self._reader)
                encoding = self._kt_kernel.encoding(form.name) if self._kt_kernel is not None else None
                if self._kt_kernel is not None and encoding is not None:
                    self._say(f"{shape.name} {form.name}: kt-kernel")
                    self._kt_kernel.add(case, rows, checkpoints.get(encoding))

    def _measure_format(self, case: LayerCase, form: BenchFormat, directory: Path) -> list[Row]:
        rows: list[Row] = []
        for isa in self._plan.isas:
            for threads in self._plan.threads:
                where = f"{case.shape.name} {form.name} {isa} {threads} thread{'s' * (threads > 1)}"
                self._say(f"{where}: loading")
                store = self._load(case, form, directory, isa, threads)
                try:
                    bench = StoreBench(case, form, store, self._plan.patience, self._reader)
                    for tokens, op in self._plan.cases():
                        made = bench.rows(tokens, op)
                        for row in made:
                            what = f"{row.op} ({row.activations})" if row.activations else row.op
                            self._say(f"{where}: {what}, {tokens} tokens: {row.timing.ms:.2f} ms")
                        rows += made
                finally:
                    store.close()
        return rows

    def _load(self, case: LayerCase, form: BenchFormat, directory: Path, isa: str, threads: int) -> ExpertStore:
        sizes = ExpertShape(case.shape.num_experts, case.shape.hidden, case.shape.intermediate)
        start = time.perf_counter()
        with PeakMemory() as peak:
            store = ExpertStore.load(
                directory,
                {0: prefix(form.encoding)},
                sizes,
                isa=isa,
                num_threads=threads,
                expert_format=form.quantize,
                mlp=case.shape.mlp,
            )
        extra = peak.extra_bytes
        self._loads.append(
            {
                "shape": case.shape.name,
                "format": form.name,
                "isa": isa,
                "threads": threads,
                "seconds": time.perf_counter() - start,
                "peak_extra_bytes": extra,
                "peak_extra_ratio": None if extra is None else extra / store.weight_bytes,
                "resident_bytes": store.resident_bytes,
                "weight_bytes": store.weight_bytes,
            }
        )
        return store


def _merged(
    first: dict[tuple[str, int], Limits], second: dict[tuple[str, int], Limits]
) -> dict[tuple[str, int], Limits]:
    """The better limit of both. A limit with more threads is at least that with fewer."""
    merged = {key: found.or_better(second[key]) for key, found in first.items()}
    for isa, threads in sorted(merged):
        for other, fewer in merged:
            if other == isa and fewer < threads:
                merged[isa, threads] = merged[isa, threads].or_better(merged[isa, fewer])
    return merged
