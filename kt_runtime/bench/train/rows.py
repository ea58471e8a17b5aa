"""One row of the result: a setting with both sides' measurements."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Measured:
    """`seconds`: of each counted step. `losses`: mean per token of every step, the first with the untrained adapter."""

    seconds: list[float]
    losses: list[float]
    peak_bytes: int

    def tokens_per_s(self, step_tokens: int) -> float:
        """Tokens per second of the median step."""
        return step_tokens / median(self.seconds)

    def best_tokens_per_s(self, step_tokens: int) -> float:
        """Tokens per second of the shortest step."""
        return step_tokens / min(self.seconds)


@dataclass(frozen=True)
class Row:
    targets: str
    activations: str
    step_tokens: int
    ours: Measured
    peer: Measured | None
    attention_tokens_per_s: float | None  # ours, same activations, LoRA on attention only

    def as_json(self) -> dict[str, Any]:
        rate = self.ours.tokens_per_s(self.step_tokens)
        values: dict[str, Any] = {
            "targets": self.targets,
            "activations": self.activations,
            "tokens_per_s": rate,
            "tokens_per_s_best": self.ours.best_tokens_per_s(self.step_tokens),
            "step_seconds": self.ours.seconds,
            "losses": self.ours.losses,
            "peak_bytes": self.ours.peak_bytes,
            "slower_than_attention": self._slower_by(rate),
        }
        return values | self._peer_values(rate)

    def _slower_by(self, rate: float) -> float | None:
        return None if self.attention_tokens_per_s is None else 1 - rate / self.attention_tokens_per_s

    def _peer_values(self, rate: float) -> dict[str, Any]:
        names = ("tokens_per_s", "tokens_per_s_best", "step_seconds", "losses", "peak_bytes")
        if self.peer is None:
            return {f"hf_peft_{name}": None for name in names} | {"ratio": None, "memory_ratio": None}
        peer_rate = self.peer.tokens_per_s(self.step_tokens)
        return {
            "hf_peft_tokens_per_s": peer_rate,
            "hf_peft_tokens_per_s_best": self.peer.best_tokens_per_s(self.step_tokens),
            "hf_peft_step_seconds": self.peer.seconds,
            "hf_peft_losses": self.peer.losses,
            "hf_peft_peak_bytes": self.peer.peak_bytes,
            "ratio": rate / peer_rate,
            "memory_ratio": self.ours.peak_bytes / self.peer.peak_bytes if self.peer.peak_bytes else None,
        }
