"""Log-probabilities of answers under DPO's reference, from the serving path instead of the training twin.

Pairs often share their prompts. The server's prefix cache keeps the keys and values of a prompt, so that the layers
compute a prompt once, however many answers it has. SGLang reuses at most `logprob_start_len` cached tokens of a
request, and computes log-probabilities from that position on. Here the position is the prompt's last token, which
predicts the answer's first. The tokens before it are called the prompt's prefix. With pages of P tokens, up to P - 1
tokens of a prefix are computed again for each answer.

Order: the first answer of a prompt is sent alone and the others after its reply, since otherwise all answers in flight
would compute the prefix. At most `num_at_once` prompts are open at a time, which bounds the cache's memory. Prompts of
an earlier call come before others, while the cache still has them. The longest request of all is sent first and alone:
a request that is too long for the server fails at once, and a system prompt shared by all is computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.serving_path import Answer, Ask, ServingPath, malformed

STOP_SECONDS = 0.1

LogProbs = npt.NDArray[np.float32]
"""Log-probabilities of an answer's counted tokens, in order."""
Serving = Callable[[Path | None], AbstractContextManager[ServingPath]]
"""Serves the adapter of a directory, or the base for None, within the context."""
Scored = Callable[[Example, LogProbs], None]


@dataclass(frozen=True, eq=False)
class _Question:
    """One request, for all `examples` with this very sequence. `ids[: start + 1]` is the prompt."""

    ids: list[int]
    start: int
    examples: list[Example]

    @property
    def where(self) -> str:
        return self.examples[0].where

    def body(self) -> dict[str, Any]:
        return {
            "input_ids": self.ids,
            "return_logprob": True,
            "logprob_start_len": self.start,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
        }


@dataclass
class Counters:
    """Sums over all requests so far. `prefix_tokens`: of distinct prefixes; `prefix_tokens_sent`: of all requests.

    `cached_tokens`: prompt tokens found in the server's cache, all of them prefix tokens.
    """

    num_pairs: int = 0
    num_answers: int = 0
    tokens_sent: int = 0
    prefix_tokens: int = 0
    prefix_tokens_sent: int = 0
    cached_tokens: int = 0
    prompts: set[bytes] = field(default_factory=set)

    @property
    def tokens_computed(self) -> int:
        return self.tokens_sent - self.cached_tokens

    @property
    def prefix_tokens_computed(self) -> int:
        return self.prefix_tokens_sent - self.cached_tokens

    def __str__(self) -> str:
        return (
            f"{self.num_pairs:,} pairs over {len(self.prompts):,} prompts, {self.num_answers:,} answers asked for: "
            f"{self.tokens_sent:,} tokens sent, {self.cached_tokens:,} from the prefix cache, "
            f"{self.tokens_computed:,} computed; the prompts have {self.prefix_tokens:,} tokens before their last, of "
            f"which {self.prefix_tokens_computed:,} were computed"
        )


def ask_reference(
    path: ServingPath, pairs: Sequence[Pair], counters: Counters, scored: Scored, stop: Callable[[], bool]
) -> bool:
    """Calls `scored` once for each example of `pairs`, in the order of the replies; False if `stop` ended it early.

    Raises as ServingPath, and NumericsError for a log-probability that is NaN or infinite.
    """
    groups = _questions(pairs, counters.prompts)
    counters.num_pairs += len(pairs)

    def answered(question: _Question, answer: Answer) -> None:
        counters.num_answers += 1
        counters.tokens_sent += len(question.ids)
        counters.prefix_tokens_sent += question.start
        counters.cached_tokens += int(answer["meta_info"].get("cached_tokens") or 0)
        logprobs = _logprobs(question, answer)
        for example in question.examples:
            scored(example, logprobs)

    finished = False

    async def work(ask: Ask) -> None:
        nonlocal finished
        finished = await _unless(stop, _ask_groups(ask, list(groups.values()), path.num_at_once, answered))

    try:
        path.run(work)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error} (ref_logprobs: serving; with twin the server is not asked)") from None
    for prefix, questions in groups.items():
        if prefix not in counters.prompts:
            counters.prompts.add(prefix)
            counters.prefix_tokens += questions[0].start
    return finished


def _questions(pairs: Iterable[Pair], known: Container[bytes]) -> dict[bytes, list[_Question]]:
    """By prompt: first the one with the longest request, then those in `known`, then the others from long to short."""
    groups: dict[bytes, dict[bytes, _Question]] = {}
    for pair in pairs:
        for example in pair.examples:
            ids, start = example.ids, int(np.argmax(example.trained))
            same = groups.setdefault(ids[: start + 1].tobytes(), {})
            key = ids.tobytes() + example.trained.tobytes()
            same.setdefault(key, _Question(ids.tolist(), start, [])).examples.append(example)
    ordered = {prompt: list(same.values()) for prompt, same in groups.items()}
    longest_first = sorted(ordered, key=lambda prompt: -max(len(question.ids) for question in ordered[prompt]))
    others = sorted(longest_first[1:], key=lambda prompt: prompt not in known)
    return {prompt: ordered[prompt] for prompt in [*longest_first[:1], *others]}


async def _ask_groups(
    ask: Ask, groups: Sequence[Sequence[_Question]], num_open: int, answered: Callable[[_Question, Answer], None]
) -> None:
    turns = asyncio.Semaphore(num_open)

    async def one(question: _Question) -> None:
        answered(question, await ask(question.body(), question.where))

    async def rest(questions: Sequence[_Question]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for question in questions:
                tasks.create_task(one(question))

    async def group(questions: Sequence[_Question]) -> None:
        async with turns:
            await one(questions[0])
            await rest(questions[1:])

    if not groups:
        return
    longest, *others = sorted(groups[0], key=lambda question: -len(question.ids))
    await one(longest)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rest(others))
        for questions in groups[1:]:
            tasks.create_task(group(questions))


async def _unless(stop: Callable[[], bool], work: Coroutine[Any, Any, None]) -> bool:
    """True when `work` has finished; False when `stop` returned True before, which cancels `work`."""
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait({task}, timeout=STOP_SECONDS))[0]:
        if stop():
            task.cancel()
            await asyncio.wait({task})
            return False
    task.result()
    return True


def _logprobs(question: _Question, answer: Answer) -> LogProbs:
    """Parses SGLang's list, which has one entry for each token from `start` on; the first entry has no value."""
    example = question.examples[0]
    try:
        found = np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)
    except (KeyError, TypeError, ValueError):
        raise malformed(question.where, answer) from None
    if len(found) != example.num_tokens - question.start:
        raise malformed(question.where, f"{len(found)} log-probabilities of {example.num_tokens - question.start}")
    counted = found[example.trained[question.start :]]
    if not np.isfinite(counted).all():
        raise NumericsError(f"{question.where}: the serving path's log-probabilities are not all numbers")
    return counted
