"""One row of the result: a case with its measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kt_runtime.bench.experts.limits import Limits, Work
from kt_runtime.bench.experts.timing import Timing


@dataclass
class Row:
    shape: str
    experts: int
    format: str  # the requested format
    weight_format: str  # the store's name for the format
    isa: str
    threads: int
    tokens: int
    op: str
    timing: Timing
    work: Work
    touched_experts: int
    rel_error: float
    resident_bytes: int  # of the layer, packed
    weight_bytes: int  # of the layer, as a checkpoint stores that format
    peers: dict[str, float] = field(default_factory=dict)  # ms; for kt_kernel its fastest class
    peer_errors: dict[str, float] = field(default_factory=dict)
    kt_kernel_classes: dict[str, float] = field(default_factory=dict)  # ms
    # forward with int8 activations: the parts of rel_error from quantizing activations and from quantizing weights
    activation_error: float | None = None
    weight_error: float | None = None
    # forward_backward only
    activations: str | None = None  # "retain" or "recompute"
    ratio_to_forward: float | None = None  # to forward of the base alone
    ratio_to_lora_forward: float | None = None  # to forward with the same LoRA
    gradient_errors: dict[str, float] | None = None

    def as_json(self, limits: Limits) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in ("timing", "work")}
        needed_s, bound = self.work.limit(limits)
        seconds = self.timing.ms / 1e3
        return values | {
            "ms": self.timing.ms,
            "ms_median": self.timing.ms_median,
            "runs": self.timing.runs,
            "limit_ratio": needed_s / seconds,
            "limit": bound,
            "weight_bytes_per_s": self.work.weight_bytes / seconds,
            "operations_per_s": sum(self.work.operations.values()) / seconds,
        }
