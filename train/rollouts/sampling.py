"""Answers to groups of one prompt, sampled over SGLang's `/generate` with their log-probabilities.

A group is one request with a seed for each answer. SGLang computes the prompts of one batch separately, so a prompt of
a page or more is sent first and alone, with no answer: the group then finds it in the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import numpy as np

from kt_runtime.errors import NumericsError
from kt_runtime.train.rollouts.rollout import Completion
from kt_runtime.train.serving_path import Answer, Ask, ServingPath, malformed

SHARED_TOKENS = 64  # a page of the prefix cache; of a shorter prompt nothing would be found there
FORGET_SECONDS = 60.0
MOST_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt, and the seed of each of its answers. Without seeds the prompt gets one greedy answer."""

    ids: Sequence[int]
    seeds: Sequence[int]
    where: str


class Sampler(Protocol):
    """Samples the answers of a run. Called from any thread, by one thread at a time."""

    def sample(self, adapter: str, asked: Sequence[Asked]) -> list[list[Completion]]:
        """The answers to each of `asked`, in order, by the adapter's version of the time of the call."""

    def forget(self, adapter: str) -> None:
        """Unloads the adapter. Ignores a name that the server does not have."""


@dataclass(frozen=True)
class HttpSampler:
    """`sampling`: SGLang's parameters of every answer, `max_new_tokens` among them. Raises as ServingPath, and
    NumericsError for a log-probability that is no number."""

    url: str
    api_key: str | None = field(repr=False)
    sampling: Mapping[str, Any]

    def sample(self, adapter: str, asked: Sequence[Asked]) -> list[list[Completion]]:
        found: list[list[Completion]] = [[] for _ in asked]

        async def one(ask: Ask, index: int) -> None:
            found[index] = await self._group(ask, asked[index])

        async def work(ask: Ask) -> None:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(asked)):
                    tasks.create_task(one(ask, index))

        if asked:
            ServingPath(self.url, self.api_key, adapter, min(len(asked), MOST_AT_ONCE)).run(work)
        return found

    def forget(self, adapter: str) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with httpx.Client(base_url=self.url, headers=headers, timeout=FORGET_SECONDS, trust_env=False) as http:
            answer = http.delete(f"/kt/adapters/{adapter}")
        if answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()

    async def _group(self, ask: Ask, asked: Asked) -> list[Completion]:
        ids = [int(token) for token in asked.ids]
        if len(asked.seeds) > 1 and len(ids) >= SHARED_TOKENS:
            await ask({"input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": 0}}, asked.where)
        settings: list[dict[str, Any]] = [{**self.sampling, "sampling_seed": seed} for seed in asked.seeds]
        settings = settings or [{**self.sampling, "temperature": 0.0, "top_p": 1.0, "top_k": -1}]
        body = {"input_ids": [ids] * len(settings), "sampling_params": settings, "return_logprob": True}
        answers = await ask(body, asked.where)
        if not isinstance(answers, list) or len(answers) != len(settings):
            raise malformed(asked.where, answers)
        return [_completion(answer, asked.where) for answer in answers]


def _completion(answer: Answer, where: str) -> Completion:
    try:
        meta = answer["meta_info"]
        pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
        logprobs = np.array([logprob for logprob, _ in pairs], np.float32)
        tokens = np.array([token for _, token in pairs], np.int32)
        made = Completion(tokens, logprobs, str(answer["text"]), meta["finish_reason"]["type"] != "length")
    except (KeyError, TypeError, ValueError, IndexError):
        raise malformed(where, answer) from None
    if not len(tokens):
        raise malformed(where, answer)
    if not np.isfinite(logprobs).all():
        raise NumericsError(f"{where}: the log-probabilities of a sampled answer are not all numbers")
    return made
