"""Rollouts in checkpoints, and the seeds of answers."""

from __future__ import annotations

import numpy as np
import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.rollouts.rollout import Rollout, Trajectory, sampling_seed


def rollout() -> Rollout:
    drawn = np.random.default_rng(0)
    trajectories = [
        Trajectory(
            drawn.integers(0, 90, 2 + index, dtype=np.int32),
            drawn.integers(0, 90, 1 + index, dtype=np.int32),
            -drawn.random(1 + index, dtype=np.float32),
            bool(index % 2),
            float(index) / 3,
            index // 2,
            index // 3,
        )
        for index in range(6)
    ]
    return Rollout(4, "a1b2", 9, trajectories)


def test_a_rollout_comes_back_from_a_checkpoint_bit_by_bit() -> None:
    before = rollout()
    after = Rollout.of_arrays(before.arrays("x_"), "x_")
    assert after is not None
    assert (after.index, after.version, after.sampled_at) == (4, "a1b2", 9)
    for one, other in zip(before.trajectories, after.trajectories, strict=True):
        for name in ("prompt", "tokens", "logprobs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        for name in ("has_ended", "reward", "step", "group"):
            assert getattr(one, name) == getattr(other, name)
    assert [len(group) for group in after.groups().values()] == [3, 3]
    assert [each.reward for each in after.of_step(1)] == [2 / 3, 1.0]


def test_no_rollout_and_a_damaged_one_in_a_checkpoint() -> None:
    arrays = rollout().arrays("x_")
    assert Rollout.of_arrays(arrays, "y_") is None
    with pytest.raises(InvalidValueError, match="the checkpoint's rollout is damaged: KeyError"):
        Rollout.of_arrays({name: array for name, array in arrays.items() if name != "x_tokens"}, "x_")
    with pytest.raises(InvalidValueError, match="damaged: ValueError: lengths and tokens differ"):
        Rollout.of_arrays(arrays | {"x_tokens": arrays["x_tokens"][:-1]}, "x_")


def test_every_answer_has_a_seed_of_its_own_that_depends_on_its_place_alone() -> None:
    places = [
        (seed, index, group, one) for seed in (0, 7) for index in range(3) for group in range(4) for one in range(5)
    ]
    seeds = [sampling_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(7, 2, 3, 4) == sampling_seed(7, 2, 3, 4) == 8597310268915478369
