"""kt-kernel as a peer, in another interpreter, since kt-kernel pins its own versions of torch and other packages.

Each kt-kernel class runs in its own process, so that a crash affects only that class. The question is a JSON argument;
the answer is the last line of stdout, to which kt-kernel also prints; tensors are passed as safetensors files.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from kt_runtime.bench.experts.layer_case import Batch
from kt_runtime.bench.experts.measurement import Patience
from kt_runtime.bench.experts.plan import BenchShape
from kt_runtime.errors import NotFoundError
from kt_runtime.experts import LoraSlot

SCRIPT = Path(__file__).with_name("kt_kernel_script.py")
IMPORT_TIMEOUT_S = 180.0
LOAD_TIMEOUT_S = 600.0

# Measured format -> checkpoint encoding that kt-kernel reads. kt-kernel quantizes bf16 to int8 itself.
ENCODINGS = {"bf16": "bf16", "fp8": "fp8", "int8": "bf16", "int4": "int4_g32", "int4_g32": "int4_g32"}
FORWARD_CLASSES: dict[str, tuple[str, ...]] = {
    "bf16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
    "fp8": ("AMXFP8_MOE", "AVX2FP8_MOE"),
    "int8": ("AMXInt8_MOE",),
    "int4": ("AMXInt4_KGroup_MOE", "AVXVNNI256RawInt4_MOE", "AVX2RawInt4_MOE"),
}
TRAINING_CLASSES: dict[str, tuple[str, ...]] = {
    "bf16": ("AMXBF16_SFT_MOE",),
    "fp8": ("AMXFP8_SFT_MOE",),
    "int8": ("AMXInt8_SFT_MOE",),
    "int4": ("AMXInt4_KGroup_SFT_MOE",),
}


@dataclass
class Answer:
    """`ms` and `outputs` (of the first tokens, forward only) by class. `problems`: why a class has no result."""

    ms: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)  # by (tokens, op)
    outputs: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # by (tokens, class)
    problems: dict[str, str] = field(default_factory=dict)


class KtKernel:
    """kt-kernel in another interpreter. `problem`: why kt-kernel can't be used; None: the other fields are set."""

    def __init__(self, python: Path) -> None:
        if not python.is_file():
            raise NotFoundError(f"--peer {python}: there is no such file; expected a Python interpreter with kt-kernel")
        self._python = python.absolute()  # not resolved: the link's location identifies a virtual environment
        self.problem: str | None = None
        facts = self._run({"do": "describe"}, None, IMPORT_TIMEOUT_S)
        self.problem = facts.get("problem")
        self.version = facts.get("version")
        self.variant = facts.get("variant")
        self.classes: list[str] = facts.get("classes", [])

    def facts(self) -> dict[str, Any]:
        return {"version": self.version, "variant": self.variant, "problem": self.problem}

    def encoding(self, format_name: str) -> str | None:
        """The checkpoint encoding that kt-kernel needs for a format; None: no class supports the format."""
        return ENCODINGS.get(format_name) if self.problem is None else None

    def measure(
        self,
        directory: Path,
        shape: BenchShape,
        format_name: str,
        threads: int,
        cases: dict[tuple[int, str], list[Batch]],
        lora: LoraSlot,
        patience: Patience,
    ) -> Answer:
        """`directory` has the checkpoint and gets the input files. `cases`: batches by (tokens, op)."""
        answer = Answer()
        for op in sorted({op for _, op in cases}):
            batches = {tokens: made for (tokens, its_op), made in cases.items() if its_op == op}
            present = [name for name in _classes(op, format_name) if name in self.classes]
            if not present:
                answer.problems[f"{format_name} {op}"] = f"kt-kernel's {self.variant} variant has no such class"
                continue
            _write_inputs(directory / "inputs.safetensors", batches, lora)
            for name in present:
                question = _question(shape, format_name, threads, batches, patience, lora.scaling)
                self._ask(directory, question | {"do": op, "class": name}, answer)
        return answer

    def _ask(self, directory: Path, question: dict[str, Any], answer: Answer) -> None:
        name, op, tokens = question["class"], question["do"], question["tokens"]
        limit_s = LOAD_TIMEOUT_S + len(tokens) * max(60.0, 20 * question["seconds"])
        made = self._run(question, directory, limit_s)
        if made.get("problem"):
            answer.problems[f"{name}, {question['threads']} threads"] = made["problem"]
        for case in made.get("cases", []):
            answer.ms.setdefault((case["tokens"], op), {})[name] = case["ms"]
        outputs = directory / "outputs.safetensors"
        if outputs.exists():
            for key, tensor in load_file(outputs).items():
                answer.outputs[int(key), name] = tensor
            outputs.unlink()

    def _run(self, question: dict[str, Any], directory: Path | None, timeout_s: float) -> dict[str, Any]:
        """The script's answer, or {"problem": ...}."""
        command = [str(self._python), str(SCRIPT), json.dumps(question)]
        try:
            done = subprocess.run(
                command, cwd=directory, env=plain_environment(), capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"no answer within {timeout_s:.0f} s"}
        except OSError as error:
            return {"problem": f"{self._python} does not start: {error}"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and lines:
            answer: dict[str, Any] = json.loads(lines[-1])
            return answer
        ending = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        return {"problem": f"ended with {ending}: {(done.stderr.strip() or 'no message').splitlines()[-1][:300]}"}


def plain_environment() -> dict[str, str]:
    """The environment without variables of this interpreter, such as PYTHONPATH."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _classes(op: str, format_name: str) -> tuple[str, ...]:
    by_format = FORWARD_CLASSES if op == "forward" else TRAINING_CLASSES
    return by_format.get("int4" if format_name == "int4_g32" else format_name, ())


def _question(
    shape: BenchShape,
    format_name: str,
    threads: int,
    batches: dict[int, list[Batch]],
    patience: Patience,
    scaling: float,
) -> dict[str, Any]:
    sizes = {"experts": shape.num_experts, "top_k": shape.top_k, "hidden": shape.hidden}
    sizes |= {"intermediate": shape.intermediate, "rank": shape.rank}
    asked = {"format": format_name, "threads": threads, "runs": patience.runs, "seconds": patience.seconds}
    return sizes | asked | {"tokens": {t: len(made) for t, made in batches.items()}, "scaling": scaling}


def _write_inputs(file: Path, batches: dict[int, list[Batch]], lora: LoraSlot) -> None:
    tensors = {f"lora.{i}": t for i, t in enumerate(lora.tensors()) if t is not None}
    for tokens, made in batches.items():
        for index, batch in enumerate(made):
            named = {"x": batch.x, "ids": batch.ids.long(), "weights": batch.weights, "grad_out": batch.grad_out}
            tensors |= {f"{tokens}.{index}.{name}": tensor.clone() for name, tensor in named.items()}
    save_file(tensors, file)
