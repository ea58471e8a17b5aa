"""Which examples make which optimizer step: shuffled per epoch by the recipe's seed, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.rendering import Example
from kt_runtime.wire import Batch


def steps(examples: list[Example], recipe: Recipe, num_steps: int) -> Iterator[list[Batch]]:
    """Yields the micro-batches of each optimizer step.

    All weights of a step's trained tokens are 1 / (their number in the whole step): the step's loss is the mean over
    its trained tokens, however they are spread over micro-batches.
    """
    order = _shuffled(
        len(examples), recipe.seed, recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    )
    for _ in range(num_steps):
        chosen = [examples[index] for index in next(order)]
        weight = 1.0 / sum(example.num_trained for example in chosen)
        size = recipe.per_device_train_batch_size
        yield [_batch(chosen[start : start + size], weight) for start in range(0, len(chosen), size)]


def _shuffled(num_examples: int, seed: int, per_step: int) -> Iterator[list[int]]:
    epoch = 0
    while True:
        order = list(range(num_examples))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        for start in range(0, num_examples, per_step):
            yield order[start : start + per_step]
        epoch += 1


def _batch(examples: list[Example], weight: float) -> Batch:
    return Batch.from_sequences(
        [example.tokens for example in examples],
        [example.targets for example in examples],
        [[weight if trained else 0.0 for trained in example.trained] for example in examples],
    )
