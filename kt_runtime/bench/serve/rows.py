"""One row of the result: a case, what the machine allows, and the peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kt_runtime.bench.experts.limits import Limits, Work
from kt_runtime.bench.serve.plan import PREFILL, Case


@dataclass(frozen=True)
class TokenTime:
    """Seconds of the server for a token of every stream, means of a run: `step`: the native step, `head`: the product
    after it, `sampling`: SGLang's sampling."""

    step: float
    head: float
    sampling: float


@dataclass(frozen=True)
class Measured:
    """`rates`: tokens/s of each counted run, at least one. `experts`: distinct experts of a step in a layer, a mean;
    None: not counted. `same_tokens`: share of the server's tokens that this side would have chosen too; None: not
    compared. `token_times`: of each run that decodes the base; empty: unknown.
    """

    rates: list[float]
    experts: float | None = None
    same_tokens: float | None = None
    token_times: list[TokenTime] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    @property
    def best(self) -> float:
        return max(self.rates)


@dataclass(frozen=True)
class Row:
    """`ours`: None: not measured. `work`: of the whole prompt, or of a decode step. `experts`: distinct experts of a
    decode step, as in `work`; `are_counted`: from a peer's router, else expected of random choices. `peers`: by name,
    those with a result. `step_work`: the part of `work` that the native step does; None: the part is not timed.
    `problem`: why runs, or all of them, lack a result; None: none does.
    """

    case: Case
    ours: Measured | None
    work: Work
    experts: float | None = None
    are_counted: bool = False
    peers: Mapping[str, Measured] = field(default_factory=dict)
    step_work: Work | None = None
    problem: str | None = None

    def as_json(self, limits: Limits | None) -> dict[str, Any]:
        """`limits`: None: unknown, for a machine with a GPU."""
        seconds, bottleneck = _limit(self.work, limits)
        limit_rate = None if seconds is None else self.case.size / seconds
        rate, best = (None, None) if self.ours is None else (self.ours.tokens_per_s, self.ours.best)
        return {
            "case": self.case.kind,
            self.case.unit: self.case.size,
            "adapters": self.case.adapters,
            "tokens_per_s": rate,
            "tokens_per_s_best": best,
            "tokens_per_s_runs": [] if self.ours is None else self.ours.rates,
            "limit_share": _share(rate, limit_rate),
            "limit_share_best": _share(best, limit_rate),
            "limit": bottleneck,
            "limit_tokens_per_s": limit_rate,
            "distinct_experts": self.experts,
            "experts_counted": None if self.case.kind == PREFILL else self.are_counted,
            "step": self._step(limits),
            "peers": {name: peer.tokens_per_s for name, peer in self.peers.items()},
            "peers_best": {name: peer.best for name, peer in self.peers.items()},
            "same_tokens": {name: peer.same_tokens for name, peer in self.peers.items()},
            "problem": self.problem,
        }

    def _step(self, limits: Limits | None) -> dict[str, Any] | None:
        """Where the time of a token of every stream goes: the native step, head, sampling, everything else."""
        if self.ours is None or self.step_work is None or not self.ours.token_times:
            return None
        times, streams = self.ours.token_times, self.case.size
        step_ms, head_ms, sampling_ms = (
            [1e3 * getattr(each, part) for each in times] for part in ("step", "head", "sampling")
        )
        known_ms = zip(step_ms, head_ms, sampling_ms, strict=True)
        rest_ms = [1e3 * streams / rate - sum(parts) for rate, parts in zip(self.ours.rates, known_ms, strict=True)]
        model_ms = median(step + head for step, head in zip(step_ms, head_ms, strict=True))
        limit, bottleneck = _limit(self.step_work, limits)
        limit_ms = None if limit is None else 1e3 * limit
        return {
            "ms": median(step_ms),
            "ms_best": min(step_ms),
            "ms_runs": step_ms,
            "limit_share": _share(limit_ms, median(step_ms)),
            "limit_share_best": _share(limit_ms, min(step_ms)),
            "limit": bottleneck,
            "limit_ms": limit_ms,
            "head_ms": median(head_ms),
            "head_ms_runs": head_ms,
            "sampling_ms": median(sampling_ms),
            "sampling_ms_runs": sampling_ms,
            "rest_ms": median(rest_ms),
            "rest_ms_runs": rest_ms,
            "peers": {name: 1e3 * streams / peer.tokens_per_s / model_ms for name, peer in self.peers.items()},
        }


def _limit(work: Work, limits: Limits | None) -> tuple[float | None, str | None]:
    """As `Work.limit`."""
    return (None, None) if limits is None else work.limit(limits)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None else part / whole
