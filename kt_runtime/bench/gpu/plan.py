"""The parameters of `bench gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kt_runtime.bench.gpu.models import DEFAULT
from kt_runtime.bench.serve.plan import Plan as ServePlan
from kt_runtime.bench.train.plan import Plan as TrainPlan
from kt_runtime.errors import InvalidValueError

DTYPE = "bfloat16"


@dataclass(frozen=True)
class Plan:
    """`models`: presets, made with random weights. `layers`: fewer than they have; None: all. `peer`: a Python
    interpreter with llama-cpp-python; None: llama.cpp is not measured. `resident_shares`: of a layer's experts that are
    on the device, one server for each. The last three sizes are of a training step.
    """

    models: tuple[str, ...] = DEFAULT
    layers: int | None = None
    prefill: tuple[int, ...] = (512, 4096)
    streams: tuple[int, ...] = (1, 4, 8, 16)
    prompt_tokens: int = 128
    new_tokens: int = 64
    runs: int = 3
    resident_shares: tuple[float, ...] = (1 / 8, 1 / 4, 1 / 2)
    with_sglang: bool = True
    with_hugging_face: bool = True
    with_training: bool = True
    peer: Path | None = None
    sequences: int = 8
    tokens: int = 512
    microbatch_tokens: int = 4096

    def __post_init__(self) -> None:
        """Raises the errors of the plans of `bench serve` and `bench train`, and InvalidValueError."""
        if not self.models:
            raise InvalidValueError("--models names no model")
        for share in self.resident_shares:
            if not 0 < share <= 1:
                raise InvalidValueError(f"--resident is {share:g}; must be a share of a layer's experts, above 0 to 1")
        for model in self.models:
            self.serving(model)
            self.training(model)

    def serving(self, model: str) -> ServePlan:
        return ServePlan(
            model=model,
            prefill=self.prefill,
            streams=self.streams,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            runs=self.runs,
            with_adapters=False,
            dtype=DTYPE,
            with_sglang=False,
            with_hugging_face=False,
            peer=self.peer,
        )

    def training(self, model: str) -> TrainPlan:
        return TrainPlan(
            model=model,
            targets=("attention+experts",),
            activations=("retain",),
            sequences=self.sequences,
            tokens=self.tokens,
            microbatch_tokens=self.microbatch_tokens,
            steps=self.runs,
            dtype=DTYPE,
            with_peer=False,
        )
