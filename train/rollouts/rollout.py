"""A rollout: the answers sampled for some optimizer steps, and its form in a checkpoint.

A checkpoint holds the rollout that is being trained on, and the next one if that has been sampled already. So a resumed
run trains on the same answers. Rewards are kept too: a reward may depend on more than the answer, as on the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError

Tokens = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]

FIELDS = ("facts", "version", "steps", "groups", "prompt_lengths", "lengths", "ended", "rewards", "tokens", "logprobs")
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Completion:
    """A sampled answer. `tokens` int32 [n], n at least 1, the end token included; `logprobs` float32 [n]: of each when
    it was sampled. `has_ended`: False if `max_new_tokens` cut it off."""

    tokens: Tokens
    logprobs: LogProbs
    text: str
    has_ended: bool


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt (int32 [m]) with one of its answers and its reward. `step`: the step of the rollout that trains on it,
    from 0; `group`: the index of its prompt within the rollout."""

    prompt: Tokens
    tokens: Tokens
    logprobs: LogProbs
    has_ended: bool
    reward: float
    step: int
    group: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed: all but the last one predict a token."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True, eq=False)
class Rollout:
    """`index` from 0. `version`: of the adapter that sampled every token of it. `sampled_at`: the optimizer steps that
    this version had."""

    index: int
    version: str
    sampled_at: int
    trajectories: Sequence[Trajectory]

    def of_step(self, step: int) -> list[Trajectory]:
        return [each for each in self.trajectories if each.step == step]

    def groups(self) -> dict[int, list[Trajectory]]:
        """Trajectories by `Trajectory.group`, in order."""
        found: dict[int, list[Trajectory]] = {}
        for each in self.trajectories:
            found.setdefault(each.group, []).append(each)
        return found

    def arrays(self, prefix: str) -> dict[str, Any]:
        """numpy arrays for a checkpoint, their names beginning with `prefix`."""
        each = self.trajectories
        values = {
            "facts": np.array([self.index, self.sampled_at], np.int64),
            "version": np.frombuffer(self.version.encode(), np.uint8).copy(),
            "steps": np.array([one.step for one in each], np.int32),
            "groups": np.array([one.group for one in each], np.int32),
            "prompt_lengths": np.array([len(one.prompt) for one in each], np.int32),
            "lengths": np.array([len(one.tokens) for one in each], np.int32),
            "ended": np.array([one.has_ended for one in each], np.uint8),
            "rewards": np.array([one.reward for one in each], np.float64),
            "tokens": np.concatenate([part for one in each for part in (one.prompt, one.tokens)]),
            "logprobs": np.concatenate([one.logprobs for one in each]),
        }
        return {f"{prefix}{name}": value for name, value in values.items()}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> Rollout | None:
        """The inverse of `arrays`; None without such arrays. Raises InvalidValueError if some are missing or misfit."""
        if f"{prefix}facts" not in arrays:
            return None
        try:
            found = {name: arrays[f"{prefix}{name}"] for name in FIELDS}
            index, sampled_at = map(int, found["facts"])
            trajectories = _trajectories(found)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise InvalidValueError(f"the checkpoint's rollout is damaged: {type(error).__name__}: {error}") from None
        return cls(index, found["version"].tobytes().decode(), sampled_at, trajectories)


def _trajectories(found: Mapping[str, Any]) -> list[Trajectory]:
    ends = np.cumsum(np.stack([found["prompt_lengths"], found["lengths"]], axis=1).reshape(-1))
    if ends[-1] != len(found["tokens"]) or int(found["lengths"].sum()) != len(found["logprobs"]):
        raise ValueError("lengths and tokens differ")
    parts = np.split(found["tokens"].astype(np.int32), ends[:-1])
    logprobs = np.split(found["logprobs"].astype(np.float32), np.cumsum(found["lengths"])[:-1])
    return [
        Trajectory(
            parts[2 * index],
            parts[2 * index + 1],
            logprobs[index],
            bool(found["ended"][index]),
            float(found["rewards"][index]),
            int(found["steps"][index]),
            int(found["groups"][index]),
        )
        for index in range(len(logprobs))
    ]


def sampling_seed(seed: int, rollout: int, group: int, generation: int) -> int:
    """The seed of one answer, from 0 to 2**63 - 1: a function of the recipe's seed and the answer's place alone, so
    that a resumed run samples what an uninterrupted one samples."""
    digest = hashlib.blake2b(f"{seed}:{rollout}:{group}:{generation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
