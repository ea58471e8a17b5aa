"""The parameters of `bench rl`, and the recipe and prompts that they make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.train.examples import Prompt
from kt_runtime.train.recipe import Recipe

GROUP = 64
"""Answers to one prompt whose sampling is compared with a single stream."""
COUNTS = ("prompts", "generations", "prompt_tokens", "new_tokens", "steps", "rounds", "rank")


@dataclass(frozen=True)
class Plan:
    """A step samples `generations` answers of `new_tokens` to each of `prompts` prompts of `prompt_tokens`, trains on
    them and runs AdamW. `steps` are counted, `warmup_steps` before them not. `rounds`: of the other measurements."""

    model: str = PRESET
    layers: int | None = None
    prompts: int = 4
    generations: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 64
    steps: int = 3
    rounds: int = 3
    rank: int = 8
    dtype: str | None = None
    warmup_steps: int = 1

    def __post_init__(self) -> None:
        """Raises InvalidValueError and UnknownNameError."""
        for name in COUNTS:
            check_number(name, getattr(self, name), {"generations": 2, "prompt_tokens": 3}.get(name, 1))
        if self.layers is not None:
            check_number("layers", self.layers)
        check_dtype(self.dtype)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens + 8

    @property
    def pool_tokens(self) -> int:
        """The size of the KV pool: room for all answers of a step, or of the group, at once, in whole pages, without
        shared prompts."""
        pages = -(-self.context_tokens // 64) + 1
        return 64 * pages * max(self.prompts * self.generations, GROUP)

    def facts(self) -> dict[str, Any]:
        return {"model": self.model, "layers": self.layers, "group": GROUP} | {
            name: getattr(self, name) for name in COUNTS
        }


def recipe_of(plan: Plan, directory: Path) -> Recipe:
    return Recipe(
        model_name_or_path=plan.model,
        stage="grpo",
        do_train=True,
        output_dir=directory,
        reward="exact_match",
        rollout_batch_size=plan.prompts,
        num_generations=plan.generations,
        max_new_tokens=plan.new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        lora_rank=plan.rank,
        disable_shuffling=True,
    )


def prompts_of(plan: Plan, vocabulary: int) -> list[Prompt]:
    """Random tokens, other prompts in every step, so that the prefix cache has none of them."""
    count = plan.prompts * (plan.steps + plan.warmup_steps)
    ids = np.random.default_rng(0).integers(3, vocabulary, (count, plan.prompt_tokens), dtype=np.int32)
    return [Prompt(row, "", "", {}, f"prompt {index}") for index, row in enumerate(ids)]


class LengthIsOdd:
    """A reward for random tokens: about half of the answers get 1, so that groups have advantages."""

    def check(self, prompt: Prompt) -> None:
        pass

    def __call__(self, completion: str, prompt: Prompt) -> float:
        return float(len(completion) % 2)
