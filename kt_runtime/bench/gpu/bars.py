"""What a machine with a GPU must reach, and whether the rows reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kt_runtime.bench.gpu.settings import (
    DECODE,
    KT_RUNTIME,
    ON_CPU,
    PREFILL,
    SGLANG,
    STREAMS_EXPERTS,
    TRAINING,
    hot_name,
)

LONG_PROMPT = 4096
DECODE_SHARE, STREAM_SHARE, STREAM_FACTOR = 0.6, 0.6, 3.0

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Bar:
    """`value`: the smallest of the rows in question; None: a row is missing. `least`: what it must be."""

    model: str
    what: str
    value: float | None
    least: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_met": None if self.value is None else self.value >= self.least}


def bars(model: str, rows: Rows) -> list[Bar]:
    """The bars of one model. `rows`: as `Row.as_json` makes them."""
    found = _Found([row for row in rows if row["model"] == model])
    return [
        Bar(model, "decode / SGLang's paged experts at equal device memory", found.against_sglang(), 1.0),
        Bar(model, "decode, experts on the CPU: share of the DRAM limit", found.decode_share(), DECODE_SHARE),
        Bar(
            model,
            f"prefill of {LONG_PROMPT} tokens, streamed: share of the bus to the device",
            found.share(ON_STREAM, "to_device"),
            STREAM_SHARE,
        ),
        Bar(
            model, f"prefill of {LONG_PROMPT} tokens: streamed / CPU", found.factor(PREFILL, LONG_PROMPT), STREAM_FACTOR
        ),
        Bar(model, "training: streamed / CPU", found.factor(TRAINING, None), STREAM_FACTOR),
    ]


ON_STREAM = (KT_RUNTIME, STREAMS_EXPERTS, PREFILL, LONG_PROMPT)


class _Found:
    """Rows by (engine, setting, case, size)."""

    def __init__(self, rows: Rows) -> None:
        self._rows: dict[tuple[object, ...], Mapping[str, Any]] = {
            (row["engine"], row["setting"], row["case"], _size(row)): row for row in rows
        }

    def rate(self, *key: object) -> float | None:
        row = self._rows.get(key)
        return None if row is None else row["tokens_per_s"]

    def share(self, key: tuple[object, ...], resource: str) -> float | None:
        row = self._rows.get(key)
        return None if row is None else row["shares"].get(resource)

    def decode_share(self) -> float | None:
        keys = [key for key in self._rows if key[:3] == (KT_RUNTIME, ON_CPU, DECODE)]
        return _least([self.share(key, "dram") for key in keys])

    def against_sglang(self) -> float | None:
        """Least ratio to SGLang's rate, over all counts of resident experts and numbers of streams."""
        theirs = [row for row in self._rows.values() if (row["engine"], row["case"]) == (SGLANG, DECODE)]
        ratios = []
        for row in theirs:
            ours = self.rate(KT_RUNTIME, hot_name(row["resident_experts"]), DECODE, row["streams"])
            ratios.append(_ratio(ours, row["tokens_per_s"]))
        return _least(ratios)

    def factor(self, case: str, size: int | None) -> float | None:
        """`size`: None: whatever size the CPU's rows have."""
        keys = [key for key in self._rows if key[:3] == (KT_RUNTIME, ON_CPU, case) and size in (None, key[3])]
        return _least([_ratio(self.rate(KT_RUNTIME, STREAMS_EXPERTS, case, key[3]), self.rate(*key)) for key in keys])


def _size(row: Mapping[str, Any]) -> int:
    return int(row["streams"] if row["case"] == DECODE else row["tokens"])


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _least(values: Sequence[float | None]) -> float | None:
    """The least value; None if one is missing, or if there are none."""
    there = [value for value in values if value is not None]
    return min(there) if there and len(there) == len(values) else None
