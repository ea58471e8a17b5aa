"""Preference training: pairs of answers, compared with a frozen reference where the loss has one.

The reference's log-probabilities are constants: each is computed once, in the first step that needs it, kept for later
epochs (8 bytes a pair), and saved with checkpoints, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.batches import to_batch
from kt_runtime.train.objective import Call, Outcome, Row, Totals, chunks, in_flight
from kt_runtime.train.recipe import Recipe
from kt_runtime.wire import Batch, ForwardResult, PreferenceLoss, ResidentClient
from kt_runtime.wire.messages import Activations

REFERENCE: Final = "reference"


def preference_loss(recipe: Recipe, scale: float = 1.0) -> PreferenceLoss:
    kind: Any = recipe.pref_loss
    return PreferenceLoss(
        kind=kind,
        beta=recipe.pref_beta,
        label_smoothing=recipe.dpo_label_smoothing if kind == "sigmoid" else 0.0,
        ftx=recipe.pref_ftx,
        gamma=recipe.simpo_gamma if kind == "simpo" else 0.0,
        scale=scale,
    )


def reference_adapter(recipe: Recipe) -> Path | None:
    """The adapter that is the reference; None: the base with adapters off, or the loss has no reference."""
    if recipe.stage != "dpo" or not preference_loss(recipe).has_reference:
        return None
    return recipe.ref_model_adapters or recipe.adapter_name_or_path


def described_reference(recipe: Recipe) -> str:
    """One line for people: which reference the loss compares with."""
    if not preference_loss(recipe).has_reference:
        return f"reference: none; {recipe.pref_loss} compares the two answers' average log-probabilities alone"
    if recipe.ref_model_adapters:
        return f"reference: the adapter {recipe.ref_model_adapters} (ref_model_adapters), frozen"
    if recipe.adapter_name_or_path:
        return (
            f"reference: the starting adapter {recipe.adapter_name_or_path}, frozen (LLaMA-Factory would take the base)"
        )
    return "reference: the base model, with adapters off"


class Dpo:
    """`train`: the pairs of the run, in the order of which `state` speaks."""

    def __init__(
        self,
        client: ResidentClient,
        session: str,
        recipe: Recipe,
        train: Sequence[Row],
        activations: Activations,
    ) -> None:
        self._client, self._session, self._recipe, self._activations = client, session, recipe, activations
        self._num_train = len(train)
        self._index = {id(pair): index for index, pair in enumerate(train)}
        self._reference = np.full((len(train), 2), np.nan, np.float32)
        self._kept = list(train)  # keeps the pairs alive, and with them their ids

    def accumulate(self, micro_batches: Sequence[Sequence[Row]]) -> Outcome:
        num_pairs = sum(len(micro_batch) for micro_batch in micro_batches)
        loss = preference_loss(self._recipe, scale=1.0 / num_pairs)
        references = self._references(micro_batches, loss)
        batches = [to_batch(micro_batch, 1.0) for micro_batch in micro_batches]
        tickets = [
            self._client.begin_forward_backward(
                self._session, batch, loss, reference=reference, activations=self._activations
            )
            for batch, reference in zip(batches, references, strict=True)
        ]
        results = [self._client.finish_forward(*call) for call in zip(tickets, batches, strict=True)]
        return Outcome(
            loss=sum(result.loss for result in results),
            num_tokens=sum(result.num_computed for result in results),
            num_samples=num_pairs,
            metrics=_means(results, num_pairs),
        )

    def evaluate(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Totals | None:
        self._know(rows)
        totals = Totals()
        for result, chunk in in_flight(self._client, self._calls(rows, batch_size, stop), stop):
            totals.add(result, count=len(chunk), trained_tokens=sum(row.num_trained for row in chunk))
        return None if stop() else totals

    def state(self) -> dict[str, Any]:
        """`reference` float32 [pairs, 2]: log-probabilities of chosen and rejected, NaN where not computed yet."""
        has_reference = preference_loss(self._recipe).has_reference
        return {REFERENCE: self._reference[: self._num_train].copy()} if has_reference else {}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        saved = arrays.get(REFERENCE)
        if saved is None:
            return
        if saved.shape != (self._num_train, 2) or saved.dtype != np.float32:
            raise InvalidValueError(
                f"reference log-probabilities of the checkpoint are {saved.dtype} {list(saved.shape)}; this run needs "
                f"float32 [{self._num_train}, 2]"
            )
        self._reference[: self._num_train] = saved

    def _know(self, rows: Sequence[Row]) -> None:
        """Makes room for the reference of evaluation's pairs, which are computed once as well."""
        new = [row for row in rows if id(row) not in self._index]
        for row in new:
            self._index[id(row)] = len(self._kept)
            self._kept.append(row)
        self._reference = np.concatenate((self._reference, np.full((len(new), 2), np.nan, np.float32)))

    def _calls(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Iterator[Call]:
        loss = preference_loss(self._recipe)
        for chunk in chunks(rows, batch_size):
            if stop():
                return
            [reference] = self._references([chunk], loss)
            batch = to_batch(chunk, 1.0)
            ticket = self._client.begin_forward(self._session, batch, loss, reference=reference)
            yield ticket, batch, chunk

    def _references(
        self, micro_batches: Sequence[Sequence[Row]], loss: PreferenceLoss
    ) -> list[npt.NDArray[np.float32] | None]:
        """Per micro-batch what the wire's `reference` carries: float32 [2 * pairs], or None."""
        if not loss.has_reference:
            return [None] * len(micro_batches)
        places = [[self._index[id(row)] for row in micro_batch] for micro_batch in micro_batches]
        missing = [number for number, place in enumerate(places) if np.isnan(self._reference[place]).any()]
        batches = {number: to_batch(micro_batches[number], 1.0) for number in missing}
        tickets = {
            number: self._client.begin_forward(self._session, batch, loss, model=REFERENCE)
            for number, batch in batches.items()
        }
        for number, ticket in tickets.items():
            result = self._client.finish_forward(ticket, batches[number])
            self._reference[places[number]] = _summed(result, batches[number]).reshape(-1, 2)
        return [self._reference[place].reshape(-1) for place in places]


def _summed(result: ForwardResult, batch: Batch) -> npt.NDArray[np.float32]:
    """Sum of each sequence's counted log-probabilities, added in float64."""
    weights = batch.split(batch.weights)
    sums = [
        float(np.sum(logprobs[weight != 0], dtype=np.float64))
        for logprobs, weight in zip(result.logprobs, weights, strict=True)
    ]
    return np.asarray(sums, np.float32)


def _means(results: Sequence[ForwardResult], num_pairs: int) -> dict[str, float]:
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    return {name: sum(result.metrics.get(name, 0.0) for result in results) / num_pairs for name in names}
