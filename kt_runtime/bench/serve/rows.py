"""One row of the result: a case, what the machine allows, and the peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kt_runtime.bench.experts.limits import Limits, Work
from kt_runtime.bench.serve.plan import PREFILL, Case


@dataclass(frozen=True)
class Measured:
    """`rates`: tokens/s of each counted run. `experts`: distinct experts of a step in a layer, a mean; None: not
    counted. `same_tokens`: share of the server's tokens that this side would have chosen too; None: not compared."""

    rates: list[float]
    experts: float | None = None
    same_tokens: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    @property
    def best(self) -> float:
        return max(self.rates)


@dataclass(frozen=True)
class Row:
    """`work`: of the whole prompt, or of a decode step. `experts`: distinct experts of a decode step, as in `work`;
    `are_counted`: from a peer's router, else expected of random choices. `peers`: by name, those with a result."""

    case: Case
    ours: Measured
    work: Work
    experts: float | None = None
    are_counted: bool = False
    peers: Mapping[str, Measured] = field(default_factory=dict)

    def as_json(self, limits: Limits | None) -> dict[str, Any]:
        """`limits`: None: unknown, for a machine with a GPU."""
        seconds, bottleneck = (None, None) if limits is None else self.work.limit(limits)
        limit_rate = None if seconds is None else self.case.size / seconds
        return {
            "case": self.case.kind,
            self.case.unit: self.case.size,
            "adapters": self.case.adapters,
            "tokens_per_s": self.ours.tokens_per_s,
            "tokens_per_s_best": self.ours.best,
            "tokens_per_s_runs": self.ours.rates,
            "limit_share": None if limit_rate is None else self.ours.tokens_per_s / limit_rate,
            "limit_share_best": None if limit_rate is None else self.ours.best / limit_rate,
            "limit": bottleneck,
            "limit_tokens_per_s": limit_rate,
            "distinct_experts": self.experts,
            "experts_counted": None if self.case.kind == PREFILL else self.are_counted,
            "peers": {name: peer.tokens_per_s for name, peer in self.peers.items()},
            "peers_best": {name: peer.best for name, peer in self.peers.items()},
            "same_tokens": {name: peer.same_tokens for name, peer in self.peers.items()},
        }
