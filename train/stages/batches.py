"""Assigns examples to optimizer steps, and encodes them for the wire.

The order is a function of the recipe's seed, the epoch and the number of sequences. So any step can be planned without
the steps before it, which resuming relies on. A sequence here is an example or, with packing, a bin of examples: bins
make micro-batches with similar numbers of tokens. Examples in a bin remain separate sequences on the wire: they never
attend to each other, whatever kind of packing the recipe names. This is LLaMA-Factory's `neat_packing`.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np

from kt_runtime.train.examples import Example, Pair, Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.wire import Batch

Item = Example | Pair | Prompt
MicroBatch = list[Item]


def plan(examples: Sequence[Item], recipe: Recipe, num_steps: int, first_step: int = 0) -> Iterator[list[MicroBatch]]:
    """The micro-batches of the steps `first_step` to `num_steps` - 1, step by step.

    Every example comes once per epoch; an epoch's last step may be smaller. With packing a micro-batch holds the
    examples of `per_device_train_batch_size` bins.
    """
    bins = _bins(examples, recipe)
    size, per_step = recipe.per_device_train_batch_size, recipe.rows_per_step
    in_epoch = math.ceil(len(bins) / per_step)
    epoch, order = -1, list(range(len(bins)))
    for step in range(first_step, num_steps):
        if step // in_epoch != epoch:
            epoch = step // in_epoch
            order = _order(len(bins), recipe, epoch)
        start = step % in_epoch * per_step
        chosen = [bins[index] for index in order[start : start + per_step]]
        yield [
            [examples[index] for each in chosen[begin : begin + size] for index in each]
            for begin in range(0, len(chosen), size)
        ]


def num_sequences(examples: Sequence[Item], recipe: Recipe) -> int:
    """The number of sequences in an epoch: bins with packing, otherwise examples."""
    return len(_bins(examples, recipe))


def steps_per_epoch(examples: Sequence[Item], recipe: Recipe) -> int:
    """Optimizer steps per epoch, as Hugging Face's Trainer counts them; a smaller last one counts."""
    return math.ceil(num_sequences(examples, recipe) / recipe.rows_per_step)


def to_batch(micro: Sequence[Item], weight: float) -> Batch:
    """One wire sequence per example; a pair becomes two: chosen, then rejected.

    The weight of an example's trained token is `weight`: with 1 / (trained tokens of the whole optimizer step), the
    step's loss is their mean. A pair's tokens have 1.0, which only selects them: the preference loss has its own scale.
    """
    parts = list(_sequences(micro, weight))
    return Batch(
        np.concatenate([example.tokens for example, _ in parts]),
        np.concatenate([example.targets for example, _ in parts]),
        np.concatenate([example.trained.astype(np.float32) * np.float32(each) for example, each in parts]),
        [example.num_tokens for example, _ in parts],
    )


def _bins(examples: Sequence[Item], recipe: Recipe) -> list[list[int]]:
    """Bins of indices. As in LLaMA-Factory, preferences are not packed, and neither are prompts."""
    if not recipe.packing or any(not isinstance(item, Example) for item in examples):
        return [[index] for index in range(len(examples))]
    return pack([item.num_tokens for item in examples], recipe.cutoff_len)


def _order(count: int, recipe: Recipe, epoch: int) -> list[int]:
    order = list(range(count))
    if not recipe.disable_shuffling:
        seed = recipe.seed if recipe.data_seed is None else recipe.data_seed
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _sequences(micro: Sequence[Item], weight: float) -> Iterator[tuple[Example, float]]:
    for item in micro:
        if isinstance(item, Pair):
            yield from ((example, 1.0) for example in item.examples)
        else:
            assert isinstance(item, Example), "prompts are sampled, not trained"
            yield item, weight


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, every index in exactly one bin.

    Best fit decreasing (Johnson 1973: at most 11/9 of the fewest possible bins, plus one). An example longer than
    `capacity` has its own bin. Bins are ordered by their first example, and examples within a bin by index.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place < len(room):
            left, target = room.pop(place)
        else:
            left, target = capacity, len(bins)
            bins.append([])
        bins[target].append(index)
        bisect.insort(room, (left - lengths[index], target))
    return sorted(sorted(each) for each in bins)
