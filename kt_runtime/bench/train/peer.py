"""Hugging Face + PEFT as the peer: one process per measurement, whose end frees all memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.bench.options import DTYPE_BYTES, DTYPES
from kt_runtime.bench.peer_place import place_here
from kt_runtime.bench.train.plan import LEARNING_RATE, Plan
from kt_runtime.bench.train.rows import Measured
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.models.checkpoint import count_parameters
from kt_runtime.serve.models.checkpoint_files import read_config
from kt_runtime.wire.messages import Activations

SCRIPT = Path(__file__).with_name("peer_script.py")
TIMEOUT_S = 3600.0
PROBE_TOKENS = 32  # enough if one dtype is emulated in software
CLEARLY_FASTER = 4.0  # below this ratio a whole sequence decides: some instructions pay off only with many tokens


@dataclass
class Peer:
    """`probes`: dtype -> tokens/s of a step with the first `probe_tokens` of one sequence. `dtype`: of the measurement,
    `plan.peer_dtype` or else the faster one."""

    plan: Plan
    model: Path
    sequences: npt.NDArray[np.int64]
    say: Callable[[str], None]
    probes: dict[str, float] = field(default_factory=dict)
    probe_tokens: int = 0
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: str = ""

    def choose_dtype(self) -> None:
        if self.plan.peer_dtype is not None:
            self.dtype = self.plan.peer_dtype
            return
        for most in (PROBE_TOKENS, self.sequences.shape[1]):
            some = self.sequences[:1, :most]
            if some.shape[1] == self.probe_tokens:
                break
            self.probe_tokens = some.shape[1]
            for dtype in DTYPES:
                self.say(f"Hugging Face + PEFT: {some.shape[1]} tokens in {dtype}")
                answer = self._ask("attention", "retain", dtype, some, [(0, 1)], 2)
                self.probes[dtype] = some.shape[1] / min(answer["seconds"])
            if max(self.probes.values()) > CLEARLY_FASTER * min(self.probes.values()):
                break
        self.dtype = max(self.probes, key=lambda dtype: self.probes[dtype])

    def measure(self, targets: str, activations: Activations) -> Measured:
        """Trains with warm-up and counted steps. `recompute` means Hugging Face's gradient checkpointing."""
        self.say(f"Hugging Face + PEFT: {targets}, {activations} in {self.dtype}")
        steps = self.plan.warmup_steps + self.plan.steps
        answer = self._ask(targets, activations, self.dtype, self.sequences, self.plan.micro_batches(), steps)
        measured = Measured(answer["seconds"][self.plan.warmup_steps :], answer["losses"], answer["peak_bytes"])
        names = ("parameters", "loading_peak_bytes", "experts", "device", "device_peak_bytes")
        self.facts[targets] = {name: answer[name] for name in names}
        rate = measured.tokens_per_s(self.plan.step_tokens)
        self.say(f"Hugging Face + PEFT: {targets}, {activations}: {rate:.1f} tokens/s")
        return measured

    def as_json(self) -> dict[str, Any]:
        versions = {name: version(name) for name in ("torch", "transformers", "peft")}
        probes = {"dtype": self.dtype, "probe_tokens": self.probe_tokens, "probe_tokens_per_s": self.probes}
        return versions | probes | {"by_targets": self.facts}

    def _device(self, dtype: str) -> str:
        """The accelerator's name if the whole model fits into it, else "cpu"."""
        config = read_config(self.model)
        return place_here(config, count_parameters(config).total * DTYPE_BYTES[dtype]).device

    def _ask(
        self,
        targets: str,
        activations: Activations,
        dtype: str,
        sequences: npt.NDArray[np.int64],
        micro_batches: list[tuple[int, int]],
        steps: int,
    ) -> dict[str, Any]:
        question = {
            "model": str(self.model),
            "dtype": dtype,
            "device": self._device(dtype),
            "targets": targets,
            "checkpointing": activations == "recompute",
            "rank": self.plan.rank,
            "alpha": self.plan.alpha,
            "learning_rate": LEARNING_RATE,
            "sequences": sequences.tolist(),
            "micro_batches": micro_batches,
            "steps": steps,
            "threads": len(os.sched_getaffinity(0)),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(SCRIPT)],
                input=json.dumps(question),  # by stdin, since an argument is limited to 128 KiB
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeFault(
                f"Hugging Face + PEFT: {targets} in {dtype}: did not end within {TIMEOUT_S:.0f} s, so there is nothing "
                "to compare with; measure fewer or shorter sequences, or a smaller model"
            ) from None
        if done.returncode != 0:
            end = "\n".join(done.stderr.splitlines()[-15:])
            raise RuntimeFault(f"Hugging Face + PEFT ended with status {done.returncode}:\n{end}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
