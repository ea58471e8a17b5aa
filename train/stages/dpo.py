"""Preference training on pairs of answers, compared with a frozen reference if the loss has one.

The reference's log-probabilities are constants: each is computed once, kept for later epochs (8 bytes a pair), and
saved with checkpoints, so that a resumed run continues with the same bits. The twin computes them in the first step
that needs them, with the policy's own arithmetic: while policy and reference are the same model, the loss is exactly
that of equal models. With `ref_logprobs: serving` the serving path computes them before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.train.examples import Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.resident import Resident
from kt_runtime.train.stages.batches import to_batch
from kt_runtime.train.stages.objective import Call, Outcome, Row, Totals, chunks, in_flight
from kt_runtime.train.stages.reference_logprobs import Serving
from kt_runtime.train.stages.reference_pass import ReferencePass, Twin, summed
from kt_runtime.train.stages.reference_values import REFERENCE, ReferenceValues
from kt_runtime.wire import Batch, ForwardResult, PreferenceLoss
from kt_runtime.wire.messages import Activations


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
    """The adapter used as reference; None: the base with adapters off, or a loss without reference."""
    if recipe.stage == "grpo":
        return (recipe.ref_model_adapters or recipe.adapter_name_or_path) if recipe.kl_coef else None
    if recipe.stage != "dpo" or not preference_loss(recipe).has_reference:
        return None
    return recipe.ref_model_adapters or recipe.adapter_name_or_path


def described_reference(recipe: Recipe) -> str:
    """One line for users: the reference of the loss, and the source of its log-probabilities."""
    if not preference_loss(recipe).has_reference:
        return f"reference: none; {recipe.pref_loss} compares the two answers' average log-probabilities alone"
    path = "; log-probabilities from the serving path (ref_logprobs)" if recipe.ref_logprobs == "serving" else ""
    return _reference_model(recipe) + path


def _reference_model(recipe: Recipe) -> str:
    if recipe.ref_model_adapters:
        return f"reference: the adapter {recipe.ref_model_adapters} (ref_model_adapters), frozen"
    if recipe.adapter_name_or_path:
        return (
            f"reference: the starting adapter {recipe.adapter_name_or_path}, frozen (LLaMA-Factory would take the base)"
        )
    return "reference: the base model, with adapters off"


class Dpo:
    """`train`: the pairs of the run; their order is that of `state`. `serving`: if given, `prepare` takes the
    reference's log-probabilities from the serving path and reports its progress by `say`."""

    def __init__(
        self,
        client: Resident,
        session: str,
        recipe: Recipe,
        train: Sequence[Row],
        activations: Activations,
        serving: Serving | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._client, self._session, self._recipe, self._activations = client, session, recipe, activations
        self._values = ReferenceValues(train)
        self._serving, self._say = serving, say

    def prepare(self, rows: Iterable[Row], stop: Callable[[], bool]) -> None:
        loss = preference_loss(self._recipe)
        if self._serving is None or not loss.has_reference:
            return
        pairs = [row for row in self._values.missing(rows) if isinstance(row, Pair)]
        if not pairs or stop():
            return
        twin = Twin(self._client, self._session, loss, self._recipe.per_device_train_batch_size)
        with self._serving(reference_adapter(self._recipe)) as path:
            ReferencePass(self._values, twin, self._say).run(path, pairs, stop)

    def accumulate(self, micro_batches: Sequence[Sequence[Row]]) -> Outcome:
        """Sends the whole step as one call, as `sft` does."""
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        loss = preference_loss(self._recipe, scale=1.0 / len(rows))
        batch, reference = to_batch(rows, 1.0), self._reference(rows, loss)
        ticket = self._client.begin_forward_backward(
            self._session, batch, loss, reference=reference, activations=self._activations
        )
        result = self._client.finish_forward(ticket, batch)
        return Outcome(
            loss=result.loss,
            num_tokens=result.num_computed,
            num_samples=len(rows),
            metrics={name: value / len(rows) for name, value in result.metrics.items()},
        )

    def evaluate(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Totals | None:
        totals = Totals()
        for result, chunk in in_flight(self._client, self._calls(rows, batch_size, stop), stop):
            totals.add(result, count=len(chunk), trained_tokens=sum(row.num_trained for row in chunk))
        return None if stop() else totals

    def state(self) -> dict[str, Any]:
        """The known values. Evaluation's are included only if computing them again may give different bits."""
        if not preference_loss(self._recipe).has_reference:
            return {}
        return self._values.state(evaluation=self._serving is not None)

    def restore(self, arrays: Mapping[str, Any]) -> None:
        self._values.restore(arrays)

    def close(self) -> None:
        pass

    def _calls(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Iterator[Call]:
        loss = preference_loss(self._recipe)
        for chunk in chunks(rows, batch_size):
            if stop():
                return
            batch, reference = to_batch(chunk, 1.0), self._reference(chunk, loss)
            ticket = self._client.begin_forward(self._session, batch, loss, reference=reference)
            yield ticket, batch, chunk

    def _reference(self, rows: Sequence[Row], loss: PreferenceLoss) -> npt.NDArray[np.float32] | None:
        """The wire's `reference`: float32 [2 * pairs], or None. Computes values that are not known yet."""
        if not loss.has_reference:
            return None
        missing = self._values.missing(rows)
        if missing:
            batch = to_batch(missing, 1.0)
            ticket = self._client.begin_forward(self._session, batch, loss, model=REFERENCE)
            self._values.put(missing, _sums(self._client.finish_forward(ticket, batch), batch).reshape(-1, 2))
        return self._values.of(rows).reshape(-1)


def _sums(result: ForwardResult, batch: Batch) -> npt.NDArray[np.float32]:
    """Sum of each sequence's counted log-probabilities."""
    weights = batch.split(batch.weights)
    return np.asarray(
        [summed(logprobs[weight != 0]) for logprobs, weight in zip(result.logprobs, weights, strict=True)], np.float32
    )
