"""The pass before the first step that takes the reference's log-probabilities from the serving path.

The twin also computes those of the first pairs (the first step's); the difference between the two is reported before
the remaining requests are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.resident import Resident
from kt_runtime.train.serving_path import Progress, ServingPath
from kt_runtime.train.stages.batches import to_batch
from kt_runtime.train.stages.objective import Row, chunks
from kt_runtime.train.stages.reference_logprobs import Counters, LogProbs, ask_reference
from kt_runtime.train.stages.reference_values import REFERENCE, ReferenceValues
from kt_runtime.wire import PreferenceLoss

NUM_COMPARED = 8

Say = Callable[[str], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Twin:
    """The session's twin, called with `batch_size` pairs at a time. `loss`: has a reference and scale 1."""

    client: Resident
    session: str
    loss: PreferenceLoss
    batch_size: int

    def logprobs(self, pairs: Sequence[Row]) -> dict[int, LogProbs]:
        """The reference's log-probabilities of each example's counted tokens, by id(example)."""
        found: dict[int, LogProbs] = {}
        for chunk in chunks(pairs, self.batch_size):
            batch = to_batch(chunk, 1.0)
            ticket = self.client.begin_forward(self.session, batch, self.loss, model=REFERENCE)
            result = self.client.finish_forward(ticket, batch)
            examples = [example for pair in chunk for example in _examples(pair)]
            for example, values in zip(examples, result.logprobs, strict=True):
                found[id(example)] = values[example.trained]
        return found

    def mean_loss(self, pairs: Sequence[Row], reference: npt.NDArray[np.float32]) -> float:
        """The mean loss of the current policy. `reference`: float32 [pairs, 2]."""
        total = 0.0
        for start in range(0, len(pairs), self.batch_size):
            part = slice(start, start + self.batch_size)
            batch = to_batch(pairs[part], 1.0)
            ticket = self.client.begin_forward(self.session, batch, self.loss, reference=reference[part].reshape(-1))
            total += self.client.finish_forward(ticket, batch).loss
        return total / len(pairs)


class ReferencePass:
    """Fills in `values`. When the pass ends early, values computed so far stay."""

    def __init__(self, values: ReferenceValues, twin: Twin, say: Say) -> None:
        self.counters = Counters()
        self._values, self._twin, self._say = values, twin, say

    def run(self, path: ServingPath, pairs: Sequence[Pair], stop: Stop) -> None:
        """`pairs`: those without values, the first step's first. Raises as `ask_reference` and the client."""
        started = time.monotonic()
        progress = Progress(2 * len(pairs), self._say, verb="reference: scored", unit="answers")
        compared, rest = pairs[:NUM_COMPARED], pairs[NUM_COMPARED:]
        served = self._ask(path, compared, progress, stop, keep=True)
        if stop():
            return
        self._compare(compared, served)
        self._ask(path, rest, progress, stop)
        self._say(f"reference from the serving path in {time.monotonic() - started:.1f} s: {self.counters}")

    def _ask(
        self, path: ServingPath, pairs: Sequence[Pair], progress: Progress, stop: Stop, *, keep: bool = False
    ) -> dict[int, LogProbs]:
        kept: dict[int, LogProbs] = {}
        sums: dict[int, float] = {}

        def scored(example: Example, logprobs: LogProbs) -> None:
            sums[id(example)] = summed(logprobs)
            if keep:
                kept[id(example)] = logprobs
            progress.add()

        ask_reference(path, pairs, self.counters, scored, stop)
        done = [pair for pair in pairs if all(id(example) in sums for example in pair.examples)]
        found = [[sums[id(example)] for example in pair.examples] for pair in done]
        self._values.put(done, np.asarray(found, np.float32).reshape(-1, 2))
        return kept

    def _compare(self, pairs: Sequence[Pair], served: dict[int, LogProbs]) -> None:
        """Reports the difference between the serving path's and the twin's values, and its effect on the loss."""
        on_twin = self._twin.logprobs(pairs)
        examples = [example for pair in pairs for example in pair.examples]
        tokens = np.concatenate([np.abs(served[id(each)] - on_twin[id(each)]) for each in examples])
        sums = np.asarray([summed(on_twin[id(each)]) for each in examples], np.float32).reshape(-1, 2)
        of_serving = self._values.of(pairs)
        answers = np.abs(of_serving - sums)
        losses = [self._twin.mean_loss(pairs, reference) for reference in (sums, of_serving)]
        self._say(
            f"reference on the first {len(pairs)} pairs, serving path against twin: a token's log-probability differs "
            f"by at most {tokens.max():.2e} nats, in the mean by {tokens.mean():.2e}; an answer's sum by at most "
            f"{answers.max():.2e}, in the mean by {answers.mean():.2e}; the mean loss of these pairs is "
            f"{losses[0]:.6f} with the twin's, {losses[1]:.6f} with the serving path's"
        )


def summed(logprobs: LogProbs) -> float:
    """The sum, accumulated in float64."""
    return float(np.sum(logprobs, dtype=np.float64))


def _examples(row: Row) -> Sequence[Example]:
    return row.examples if isinstance(row, Pair) else (row,) if isinstance(row, Example) else ()
