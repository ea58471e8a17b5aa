"""Supervised fine-tuning: the mean cross-entropy of a step's trained tokens, independent of the micro-batches.

A step's micro-batches are sent as one call; the server chooses how many tokens the layers compute at once
(`--microbatch-tokens`). The gradient is the same sum, and experts in CPU memory are read once for all of these tokens
instead of once for every row. In other trainers `per_device_train_batch_size` bounds memory; here it only determines,
with `gradient_accumulation_steps`, how many rows make a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kt_runtime.train.resident import Resident
from kt_runtime.train.stages.batches import to_batch
from kt_runtime.train.stages.objective import Call, Outcome, Row, Totals, chunks, in_flight
from kt_runtime.wire.messages import Activations


class Sft:
    def __init__(self, client: Resident, session: str, activations: Activations) -> None:
        self._client, self._session, self._activations = client, session, activations

    def prepare(self, rows: Iterable[Row], stop: Callable[[], bool]) -> None:
        pass

    def accumulate(self, micro_batches: Sequence[Sequence[Row]]) -> Outcome:
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        weight = 1.0 / sum(row.num_trained for row in rows)
        batch = to_batch(rows, weight)
        ticket = self._client.begin_forward_backward(self._session, batch, activations=self._activations)
        result = self._client.finish_forward(ticket, batch)
        return Outcome(loss=result.loss, num_tokens=result.num_computed, num_samples=len(rows))

    def evaluate(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Totals | None:
        totals = Totals()
        for result, chunk in in_flight(self._client, self._calls(rows, batch_size), stop):
            trained = sum(row.num_trained for row in chunk)
            totals.add(result, count=trained, trained_tokens=trained)
        return None if stop() else totals

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

    def _calls(self, rows: Sequence[Row], batch_size: int) -> Iterator[Call]:
        for chunk in chunks(rows, batch_size):
            batch = to_batch(chunk, 1.0)
            yield self._client.begin_forward(self._session, batch), batch, chunk
