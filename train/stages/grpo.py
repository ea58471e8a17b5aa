"""Reinforcement learning with group-relative advantages: GRPO, RLOO, Dr. GRPO.

A rollout samples `num_generations` answers to each of `rollout_batch_size` prompts by SGLang, with a version of the
adapter that is published for it. The rollout's prompts are divided among `steps_per_rollout` optimizer steps. The first
of these steps trains the version that sampled: sampler and policy are one model, and where the server is exact, their
log-probabilities are equal to the bit (`kl/k3` is 0).

`routing_replay: rollout`: the later steps of a rollout train each token with the experts that sampling chose for it.

`async_rollouts`: the next rollout is sampled in a thread during the steps of this one, by the version that this one
starts from. It is complete before the next version is published, so every token's version is known.

Versions are published under a name of the run's own, which the end of the run takes from the server. After `kill -9`
the name stays until the next run over the same output directory has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kt_runtime.train.examples import Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.resident import Resident
from kt_runtime.train.rollouts.advantages import group_advantages, kl_advantages, mean_divergence, token_weight
from kt_runtime.train.rollouts.background import Background
from kt_runtime.train.rollouts.rewards import Reward, check_all
from kt_runtime.train.rollouts.rollout import Completion, Rollout, Trajectory, sampling_seed
from kt_runtime.train.rollouts.sampling import Asked, Sampler
from kt_runtime.train.stages import batches
from kt_runtime.train.stages.objective import Outcome, Row, Totals, chunks
from kt_runtime.train.stages.reference_values import REFERENCE
from kt_runtime.wire import Batch, ForwardResult, PolicyLoss, Samples
from kt_runtime.wire.messages import Activations, RoutingReplay

STEP, CURRENT, NEXT = "grpo_step", "rollout_", "next_rollout_"
NAME_PREFIX = "rollouts-"
ROUTES = ("routes/replayed", "routes/missed", "routes/moved")
TIMES = ("rollout", "forward_backward", "publish")


def policy_loss(recipe: Recipe) -> PolicyLoss:
    kind: Any = recipe.policy_loss
    return PolicyLoss(kind=kind, clip_low=recipe.clip_low, clip_high=recipe.clip_high, beta=recipe.dro_beta)


def described(recipe: Recipe) -> list[str]:
    """Lines for users: what a run samples, judges and trains."""
    steps = f"{recipe.steps_per_rollout} optimizer step{'s' if recipe.steps_per_rollout > 1 else ''}"
    when = ", the next rollout sampled meanwhile" if recipe.async_rollouts else ""
    lines = [
        f"rollouts of {recipe.rollout_batch_size} prompts x {recipe.num_generations} answers of up to "
        f"{recipe.max_new_tokens} tokens, for {steps} each{when}",
        f"reward: {recipe.reward}; advantages: {recipe.advantage_estimator}; loss: {recipe.policy_loss}",
    ]
    if recipe.routing_replay != "off":
        lines.append(f"routing replay: {recipe.routing_replay}")
    if recipe.kl_coef:
        reference = recipe.ref_model_adapters or recipe.adapter_name_or_path or "the base model"
        lines.append(f"reference of kl_coef {recipe.kl_coef:g}: {reference}")
    return lines


@dataclass(frozen=True)
class Sampling:
    """What a run samples with. `exact`: the server says that training's log-probabilities equal its own to the bit."""

    sampler: Sampler
    reward: Reward
    exact: bool = False


@dataclass(frozen=True)
class _Asking:
    """A rollout that is being sampled: its prompts, the step of the rollout that each belongs to, and the version."""

    index: int
    version: str
    sampled_at: int
    prompts: Sequence[Prompt]
    steps: Sequence[int]


class Grpo:
    """`train`: the run's prompts. `total_steps`: optimizer steps of the whole run.

    `seconds`: time spent so far, by "rollout", "publish" and "forward_backward".
    """

    def __init__(
        self,
        client: Resident,
        session: str,
        recipe: Recipe,
        train: Sequence[Row],
        total_steps: int,
        sampling: Sampling,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._client, self._session, self._recipe = client, session, recipe
        self._train, self._total_steps, self._say = train, total_steps, say
        self._sampler, self._reward, self._exact = sampling.sampler, sampling.reward, sampling.exact
        self._name = f"{NAME_PREFIX}{session}"
        self._is_published = False
        self._step = 0
        self._current: Rollout | None = None
        self._advantages: dict[int, npt.NDArray[np.float64]] = {}  # by id of the current rollout's trajectories
        self._divergence: float | None = None
        self._asking: _Asking | None = None
        self._background: Background[list[list[Completion]]] | None = None
        self._next: Rollout | None = None
        self.seconds: dict[str, float] = dict.fromkeys(TIMES, 0.0)

    def prepare(self, rows: Iterable[Row], stop: Callable[[], bool]) -> None:
        """Raises InvalidValueError for a prompt whose answers the reward can't judge."""
        check_all(self._reward, list({id(row): row for row in rows}.values()))

    def accumulate(self, micro_batches: Sequence[Sequence[Row]]) -> Outcome:
        """Trains on the next part of the rollout; samples one where a rollout begins. `micro_batches`: its prompts."""
        before = dict(self.seconds)
        steps = self._recipe.steps_per_rollout
        if self._step % steps == 0 or self._current is None:
            self._begin_rollout()
        rollout = self._current
        assert rollout is not None, "a rollout has begun"
        part = rollout.of_step(self._step % steps)
        result = self._forward_backward(rollout, part)
        outcome = self._outcome(rollout, part, result, before)
        self._step += 1
        return outcome

    def evaluate(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Totals | None:
        """One answer of the most likely tokens to each prompt, by the session's present weights."""
        self._wait_for_next()
        self._publish()
        totals = Totals(has_loss=False)
        for chunk in chunks(rows, batch_size):
            if stop():
                return None
            prompts = cast("Sequence[Prompt]", chunk)
            found = self._sampler.sample(self._name, [Asked(row.ids.tolist(), [], row.where) for row in prompts])
            for prompt, (completion,) in zip(prompts, found, strict=True):
                totals.count += 1
                for name, value in (
                    ("reward", self._reward(completion.text, prompt)),
                    ("completions/mean_length", len(completion.tokens)),
                    ("completions/truncated", not completion.has_ended),
                ):
                    totals.metrics[name] = totals.metrics.get(name, 0.0) + float(value)
        return totals

    def state(self) -> dict[str, Any]:
        """The rollouts that later steps train on; waits for the one that is being sampled."""
        arrays: dict[str, Any] = {STEP: np.array([self._step], np.int64)}
        if self._current is not None and self._step % self._recipe.steps_per_rollout:
            arrays |= self._current.arrays(CURRENT)
        self._wait_for_next()
        if self._next is not None:
            arrays |= self._next.arrays(NEXT)
        return arrays

    def restore(self, arrays: Mapping[str, Any]) -> None:
        if STEP not in arrays:
            return
        self._step = int(arrays[STEP][0])
        self._is_published = True  # by the process that wrote this state, and may not have unloaded it
        self._next = Rollout.of_arrays(arrays, NEXT)
        current = Rollout.of_arrays(arrays, CURRENT)
        if current is not None:
            self._take(current)

    def close(self) -> None:
        """Does not wait for a rollout that is being sampled, which only a run that ends early leaves."""
        if self._is_published:
            try:
                self._sampler.forget(self._name)
            except Exception as error:  # noqa: BLE001 (the run's result stands; its name only stays behind)
                self._say(f"{self._name} could not be unloaded: {error}")

    # Rollouts.

    def _begin_rollout(self) -> None:
        """Takes the rollout of this step, and in asynchronous runs starts to sample the next one."""
        self._wait_for_next()
        rollout, self._next = self._next, None
        version = self._publish() if rollout is None or self._recipe.async_rollouts else ""
        if rollout is None:
            asking = self._ask(self._step, version)
            with self._timed("rollout"):
                rollout = self._judged(asking, self._sample(asking))
        following = self._step + self._recipe.steps_per_rollout
        if self._recipe.async_rollouts and following < self._total_steps:
            asking = self._asking = self._ask(following, version)
            self._background = Background(lambda: self._sample(asking))
        self._take(rollout)

    def _ask(self, first_step: int, version: str) -> _Asking:
        """The prompts of the rollout that begins with `first_step`, to be asked of `version`, the present weights."""
        steps = self._recipe.steps_per_rollout
        planned = batches.plan(self._train, self._recipe, first_step + steps, first_step=first_step)
        rows = [(row, step) for step, micros in enumerate(planned) for micro in micros for row in micro]
        prompts = cast("list[Prompt]", [row for row, _ in rows])
        return _Asking(first_step // steps, version, self._step, prompts, [step for _, step in rows])

    def _sample(self, asking: _Asking) -> list[list[Completion]]:
        seed, generations = self._recipe.seed, range(self._recipe.num_generations)
        asked = [
            Asked(
                prompt.ids.tolist(),
                [sampling_seed(seed, asking.index, group, generation) for generation in generations],
                prompt.where,
            )
            for group, prompt in enumerate(asking.prompts)
        ]
        return self._sampler.sample(self._name, asked)

    def _judged(self, asking: _Asking, found: Sequence[Sequence[Completion]]) -> Rollout:
        """The answers with their rewards."""
        trajectories = [
            Trajectory(
                prompt.ids,
                completion.tokens,
                completion.logprobs,
                completion.has_ended,
                self._reward(completion.text, prompt),
                step,
                group,
            )
            for group, (prompt, step, completions) in enumerate(zip(asking.prompts, asking.steps, found, strict=True))
            for completion in completions
        ]
        return Rollout(asking.index, asking.version, asking.sampled_at, trajectories)

    def _wait_for_next(self) -> None:
        """Finishes the rollout that is being sampled in the background, if any."""
        background, asking = self._background, self._asking
        if background is None or asking is None:
            return
        self._background = self._asking = None
        with self._timed("rollout"):
            self._next = self._judged(asking, background.result())

    def _take(self, rollout: Rollout) -> None:
        """Makes `rollout` the current one, and computes its advantages."""
        self._current, self._advantages, self._divergence = rollout, {}, None
        for group in rollout.groups().values():
            values = group_advantages([each.reward for each in group], self._recipe.advantage_estimator)
            for each, value in zip(group, values, strict=True):
                self._advantages[id(each)] = np.full(len(each.tokens), value)
        if self._recipe.kl_coef:
            self._add_divergence(rollout.trajectories)

    def _add_divergence(self, trajectories: Sequence[Trajectory]) -> None:
        batch = _batch(trajectories, [1.0] * len(trajectories))
        with self._timed("forward_backward"):
            ticket = self._client.begin_forward(self._session, batch, model=REFERENCE)
            result = self._client.finish_forward(ticket, batch)
        sampled = [each.logprobs.astype(np.float64) for each in trajectories]
        reference = [
            row[len(each.prompt) - 1 :].astype(np.float64)
            for row, each in zip(result.logprobs, trajectories, strict=True)
        ]
        self._divergence = mean_divergence([a - b for a, b in zip(sampled, reference, strict=True)])
        for each, added in zip(trajectories, kl_advantages(sampled, reference, self._recipe.kl_coef), strict=True):
            self._advantages[id(each)] = self._advantages[id(each)] + added

    def _publish(self) -> str:
        """The version of the session's present weights, which `sample` asks from now on."""
        with self._timed("publish"):
            reply = self._client.publish(self._session, self._name, take_over=True)
        self._is_published = True
        return reply.version

    # A step.

    def _forward_backward(self, rollout: Rollout, part: Sequence[Trajectory]) -> ForwardResult:
        weights = [token_weight(self._recipe, len(part), len(each.tokens)) for each in part]
        batch = _batch(part, weights)
        samples = Samples.from_sequences(
            [_aligned(each, each.logprobs) for each in part],
            [_aligned(each, self._advantages[id(each)]) for each in part],
        )
        replay = cast(RoutingReplay, self._recipe.routing_replay)
        with self._timed("forward_backward"):
            ticket = self._client.begin_forward_backward(
                self._session,
                batch,
                policy_loss(self._recipe),
                samples=samples,
                activations=cast(Activations, self._recipe.activations),
                routing_replay=replay,
                rollout_version=None if replay == "off" else rollout.version,
            )
            return self._client.finish_forward(ticket, batch)

    def _outcome(
        self, rollout: Rollout, part: Sequence[Trajectory], result: ForwardResult, before: Mapping[str, float]
    ) -> Outcome:
        lag = self._step - rollout.sampled_at
        tokens = result.metrics.get("tokens") or float(sum(len(each.tokens) for each in part))
        divergences = {name: result.metrics[name] / tokens for name in ("kl/k1", "kl/k3")}
        self._warn(divergences["kl/k3"], lag)
        metrics = {
            **_figures(part),
            **divergences,
            **({} if self._divergence is None else {"kl/reference": self._divergence}),
            "clipped": result.metrics["clipped"] / tokens,
            **{name: result.metrics[name] / result.num_tokens for name in ROUTES if name in result.metrics},
            "rollout/lag": float(lag),
            **{f"time/{name}": self.seconds[name] - before[name] for name in TIMES},
        }
        facts = {"rollout_version": rollout.version[:16]}
        return Outcome(result.loss, result.num_computed, len(part), metrics, facts)

    def _warn(self, k3: float, lag: int) -> None:
        if self._exact and lag == 0 and k3 != 0 and self._recipe.temperature == 1:
            self._say(
                f"warning: step {self._step + 1}: kl/k3 is {k3:.3e}: the log-probabilities of sampling and training "
                "differ, although the server says that they are equal to the bit (exact in /kt/status)"
            )

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - started


def _batch(trajectories: Sequence[Trajectory], weights: Sequence[float]) -> Batch:
    """Each answer's tokens have its weight, the prompt's 0."""
    ids = [np.concatenate((each.prompt, each.tokens)) for each in trajectories]
    return Batch(
        np.concatenate([row[:-1] for row in ids]),
        np.concatenate([row[1:] for row in ids]),
        np.concatenate(
            [
                np.asarray(_aligned(each, np.full(len(each.tokens), weight)), np.float32)
                for each, weight in zip(trajectories, weights, strict=True)
            ]
        ),
        [each.num_tokens for each in trajectories],
    )


def _aligned(trajectory: Trajectory, values: npt.NDArray[Any]) -> list[float]:
    """One value for each target of the sequence, 0 for those within the prompt."""
    return [0.0] * (len(trajectory.prompt) - 1) + np.asarray(values, np.float64).tolist()


def _figures(part: Sequence[Trajectory]) -> dict[str, float]:
    groups: dict[int, list[float]] = {}
    for each in part:
        groups.setdefault(each.group, []).append(each.reward)
    rewards = np.array([each.reward for each in part])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(np.mean([np.std(group, ddof=1) for group in groups.values()])),
        "frac_reward_zero_std": float(np.mean([len(set(group)) == 1 for group in groups.values()])),
        "completions/mean_length": float(np.mean([len(each.tokens) for each in part])),
        "completions/truncated": float(np.mean([not each.has_ended for each in part])),
    }
