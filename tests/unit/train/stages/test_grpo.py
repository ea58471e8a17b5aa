"""Grpo over a resident that counts and a sampler that draws from seeds: what is sampled, sent, logged and resumed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.resident.counting_resident import CountingResident, Lines

from kt_runtime.errors import ConflictError, InvalidValueError, RuntimeFault
from kt_runtime.train.examples import Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.rollouts.advantages import group_advantages
from kt_runtime.train.rollouts.rollout import Completion, sampling_seed
from kt_runtime.train.rollouts.sampling import Asked
from kt_runtime.train.run.inputs import Inputs
from kt_runtime.train.run.loop import run
from kt_runtime.train.stages.grpo import Grpo, Sampling, described, policy_loss
from kt_runtime.wire import Batch, LoraSettings, PolicyLoss


@dataclass
class SeededSampler:
    """Answers are functions of seed and prompt. `asked`: (adapter, prompts, by a thread of its own) of each call."""

    asked: list[tuple[str, Sequence[Asked], bool]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    fails: bool = False

    def sample(self, adapter: str, asked: Sequence[Asked]) -> list[list[Completion]]:
        if self.fails:
            raise RuntimeFault("the server is gone")
        self.asked.append((adapter, asked, threading.current_thread() is not threading.main_thread()))
        return [[_completion([*map(int, each.ids), seed]) for seed in each.seeds or [0]] for each in asked]

    def forget(self, adapter: str) -> None:
        self.forgotten.append(adapter)


def _completion(entropy: list[int]) -> Completion:
    drawn = np.random.default_rng(entropy)
    tokens = drawn.integers(3, 90, drawn.integers(1, 5), dtype=np.int32)
    return Completion(tokens, -drawn.random(len(tokens), dtype=np.float32), f"{tokens[0] % 4}", bool(len(tokens) < 4))


class FirstToken:
    def check(self, prompt: Prompt) -> None:
        if prompt.answer is None:
            raise InvalidValueError(f"{prompt.where}: no answer")

    def __call__(self, completion: str, prompt: Prompt) -> float:
        return float(completion == prompt.answer)


@pytest.fixture
def prompts() -> list[Prompt]:
    drawn = np.random.default_rng(1)
    return [
        Prompt(drawn.integers(3, 90, 3 + row, dtype=np.int32), "q", str(row % 4), {}, f"rows:{row}") for row in range(6)
    ]


@pytest.fixture
def sampler() -> SeededSampler:
    return SeededSampler()


@pytest.fixture
def make(make_recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """12 steps over 6 prompts, 2 a rollout."""

    def recipe(**keys: Any) -> Recipe:
        usual = {"stage": "grpo", "reward": "exact_match", "num_generations": 4, "rollout_batch_size": 2}
        usual |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16}
        return make_recipe(**{**usual, **keys})

    return recipe


def start(resident: CountingResident, recipe: Recipe, prompts: list[Prompt], sampler: SeededSampler) -> Grpo:
    resident.create_session("s", LoraSettings(rank=1, alpha=1.0))
    return Grpo(resident, "s", recipe, prompts, 12, Sampling(sampler, FirstToken()))


def test_a_step_sends_each_answer_with_its_log_probabilities_and_advantages(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    recipe = make(disable_shuffling=True, clip_high=1.3)
    outcome = start(resident, recipe, prompts, sampler).accumulate([[]])
    (adapter, asked, in_thread), (_, batch, loss, _, _) = sampler.asked[0], resident.log[-1]
    assert (adapter, in_thread, resident.log[1][:2]) == ("rollouts-s", False, ("publish", "rollouts-s"))
    assert [each.where for each in asked] == ["rows:0", "rows:1"]
    assert [list(each.seeds) for each in asked] == [
        [sampling_seed(recipe.seed, 0, group, one) for one in range(4)] for group in range(2)
    ]
    assert loss == PolicyLoss(kind="ppo", clip_high=1.3) == policy_loss(recipe)
    samples = resident.samples[-1]
    answers = [
        (prompt, _completion([*map(int, prompt.ids), seed]))
        for prompt, each in zip(prompts, asked, strict=False)
        for seed in each.seeds
    ]
    rewards = [float(answer.text == prompt.answer) for prompt, answer in answers]
    advantages = [value for half in (rewards[:4], rewards[4:]) for value in group_advantages(half, "grpo")]
    sent = zip(
        batch.split(batch.tokens),
        batch.split(batch.targets),
        batch.split(batch.weights),
        batch.split(samples.logprobs),
        batch.split(samples.advantages),
        strict=True,
    )
    for (prompt, answer), advantage, (tokens, targets, weights, logprobs, given) in zip(
        answers, advantages, sent, strict=True
    ):
        whole, before, count = np.concatenate((prompt.ids, answer.tokens)), len(prompt.ids) - 1, len(answer.tokens)
        assert (tokens.tolist(), targets.tolist()) == (whole[:-1].tolist(), whole[1:].tolist())
        assert weights.tolist() == [0.0] * before + [np.float32(1 / (8 * count))] * count
        assert logprobs.tolist() == [0.0] * before + answer.logprobs.tolist()
        assert given == pytest.approx(
            [0.0] * before + [advantage] * count, rel=1.4e-7
        )  # rounded to float32: 1.4e-8 measured
    assert outcome.metrics["reward"] == np.mean(rewards)
    assert outcome.metrics["kl/k3"] == 0 and outcome.metrics["rollout/lag"] == 0
    assert outcome.facts == {"rollout_version": "v" * 16} and outcome.num_samples == 8


@pytest.mark.parametrize("replay", ["off", "compare", "rollout"])
def test_routes_are_asked_for_with_the_version_that_sampled_and_reported_as_shares_of_tokens(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler, replay: str
) -> None:
    recipe = make(rollout_batch_size=4, steps_per_rollout=2, routing_replay=replay)
    objective = start(resident, recipe, prompts, sampler)
    outcomes = [objective.accumulate([[]]) for _ in range(2)]
    assert resident.replays == [(replay, None if replay == "off" else "v" * 64)] * 2
    shares = {name: value for name, value in outcomes[1].metrics.items() if name.startswith("routes/")}
    replayed = 0.75 if replay == "rollout" else 0.0
    wanted = {"routes/replayed": replayed, "routes/missed": 0.25, "routes/moved": 0.5}
    assert shares == ({} if replay == "off" else wanted)
    assert (f"routing replay: {replay}" in described(recipe)) == (replay != "off")


def test_a_server_that_keeps_no_routes_is_refused_before_there_is_a_session(
    resident: CountingResident,
    display: Lines,
    make: Callable[..., Recipe],
    prompts: list[Prompt],
    sampler: SeededSampler,
    tmp_path: Path,
) -> None:
    recipe = make(output_dir=tmp_path / "out", routing_replay="rollout", num_train_epochs=1.0)
    sampling = Sampling(sampler, FirstToken())
    with pytest.raises(ConflictError, match="routing_replay: rollout: the server keeps no routes; start it with --rou"):
        run(resident, recipe, Inputs(prompts, {}), display, sampling=sampling)
    assert not resident.log
    resident.keeps_routes = True
    run(resident, recipe, Inputs(prompts, {}), display, sampling=sampling)
    assert {replay for replay, _ in resident.replays} == {"rollout"}


def test_a_rollout_is_divided_among_its_steps_and_its_version_grows_older(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    objective = start(resident, make(rollout_batch_size=6, steps_per_rollout=3), prompts, sampler)
    outcomes = [objective.accumulate([[]]) for _ in range(6)]
    assert resident.count("publish") == len(sampler.asked) == 2
    assert [len(asked) for _, asked, _ in sampler.asked] == [6, 6]
    assert [outcome.metrics["rollout/lag"] for outcome in outcomes] == [0, 1, 2, 0, 1, 2]
    lengths = [len(entry[1].lengths) for entry in resident.log if entry[0] == "forward_backward"]
    assert lengths == [8] * 6


def test_an_asynchronous_rollout_is_sampled_by_the_version_before_and_complete_before_the_next(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    objective = start(resident, make(async_rollouts=True), prompts, sampler)
    outcomes = [objective.accumulate([[]]) for _ in range(12)]
    assert [outcome.metrics["rollout/lag"] for outcome in outcomes] == [0] + [1] * 11
    assert [in_thread for _, _, in_thread in sampler.asked] == [False] + [True] * 11
    assert resident.count("publish") == 12
    synchronous = SeededSampler()
    resident.close_session("s")
    other = start(resident, make(), prompts, synchronous)
    for _ in range(12):
        other.accumulate([[]])
    seeds = [[list(each.seeds) for _, asked, _ in found.asked for each in asked] for found in (sampler, synchronous)]
    assert seeds[0] == seeds[1]


def test_an_error_of_the_sampler_ends_the_step_also_when_it_ran_in_the_background(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    objective = start(resident, make(async_rollouts=True), prompts, sampler)
    objective.accumulate([[]])
    objective.state()
    sampler.fails = True
    objective.accumulate([[]])
    with pytest.raises(RuntimeFault, match="the server is gone"):
        objective.accumulate([[]])
    objective.close()
    assert sampler.forgotten == ["rollouts-s"]


def test_the_divergence_from_the_reference_changes_advantages_only_with_kl_coef(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    start(resident, make(), prompts, sampler).accumulate([[]])
    assert resident.count("forward") == 0
    plain = resident.samples[-1].advantages
    resident.close_session("s")
    outcome = start(resident, make(kl_coef=0.5), prompts, sampler).accumulate([[]])
    asked = next(entry for entry in resident.log if entry[0] == "forward")
    batch, sent = asked[1], resident.samples[-1]
    assert asked[3] == "reference" and isinstance(batch, Batch)
    counted = batch.weights != 0
    reference = -(batch.targets % 7 + 1).astype(np.float32) * np.float32(0.1)  # as the counting resident computes it
    differences = (sent.logprobs.astype(np.float64) - reference)[counted]
    expected = plain[counted] + 0.5 * (differences.mean() - differences)
    assert sent.advantages[counted] == pytest.approx(expected, abs=6e-7)  # 6.1e-8 measured
    assert outcome.metrics["kl/reference"] == pytest.approx(differences.mean(), rel=1e-15, abs=0)


def test_a_divergence_where_the_server_is_exact_is_a_warning(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    resident.create_session("s", LoraSettings(rank=1, alpha=1.0))
    lines = Lines()
    objective = Grpo(resident, "s", make(), prompts, 12, Sampling(sampler, FirstToken(), exact=True), lines.say)
    objective.accumulate([[]])
    assert not lines.lines
    resident.k3 = 3.0
    objective.accumulate([[]])
    assert "warning: step 2: kl/k3 is" in lines


def test_evaluation_publishes_and_judges_the_likeliest_answers(
    resident: CountingResident, make: Callable[..., Recipe], prompts: list[Prompt], sampler: SeededSampler
) -> None:
    totals = start(resident, make(), prompts, sampler).evaluate(prompts, 4, lambda: False)
    assert totals is not None and (totals.count, totals.has_loss) == (6, False)
    answers = [_completion([*map(int, prompt.ids), 0]) for prompt in prompts]
    assert totals.metrics["reward"] == sum(a.text == p.answer for a, p in zip(answers, prompts, strict=True))
    assert [len(asked) for _, asked, _ in sampler.asked] == [4, 2]
    assert all(not each.seeds for _, asked, _ in sampler.asked for each in asked)


@pytest.mark.parametrize(
    "keys", [{}, {"async_rollouts": True}, {"rollout_batch_size": 6, "steps_per_rollout": 3}, {"kl_coef": 0.1}], ids=str
)
def test_a_run_that_stops_anywhere_continues_with_the_rewards_of_an_unbroken_one(
    resident: CountingResident,
    display: Lines,
    make: Callable[..., Recipe],
    prompts: list[Prompt],
    sampler: SeededSampler,
    tmp_path: Path,
    keys: dict[str, Any],
) -> None:
    def trained(out: str) -> list[dict[str, Any]]:
        recipe = make(output_dir=tmp_path / out, save_steps=1, num_train_epochs=2.0, **keys)
        run(resident, recipe, Inputs(prompts, {}), display, sampling=Sampling(sampler, FirstToken()))
        history = json.loads((tmp_path / out / "trainer_state.json").read_text())["log_history"]
        return [
            {key: value for key, value in entry.items() if not key.startswith(("time/", "train_", "total_"))}
            for entry in history
        ]

    whole = trained("whole")
    assert len(sampler.forgotten) == 1 and len(whole) == 7

    def die(step: int) -> None:
        if step in stops:
            stops.remove(step)
            raise RuntimeFault("killed")

    stops = [2, 4, 5]
    resident.on_step = die
    for _ in range(3):
        with pytest.raises(RuntimeFault, match="killed"):
            trained("broken")
    sampler.forgotten.clear()
    assert trained("broken") == whole
    assert len(sampler.forgotten) == 1  # also where this process has published nothing
    assert (tmp_path / "whole" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "broken" / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_the_log_has_the_figures_of_every_step(
    resident: CountingResident,
    display: Lines,
    make: Callable[..., Recipe],
    prompts: list[Prompt],
    sampler: SeededSampler,
    tmp_path: Path,
) -> None:
    recipe = make(max_steps=3, eval_strategy="steps", eval_steps=3, plot_loss=True)
    run(resident, recipe, Inputs(prompts, {"": prompts[:2]}), display, sampling=Sampling(sampler, FirstToken()))
    lines = [json.loads(line) for line in (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()]
    for line in lines[:3]:
        assert {"reward", "kl/k1", "kl/k3", "clipped", "rollout/lag", "completions/mean_length", "loss"} <= set(line)
        assert line["rollout_version"] == "v" * 16
    assert 0 <= lines[3]["eval_reward"] <= 1 and "eval_loss" not in lines[3]
    assert (tmp_path / "out" / "training_reward.png").is_file()
    assert "GRPO (grpo, ppo, reward exact_match)" in (tmp_path / "out" / "README.md").read_text()
    assert "rollouts of 2 prompts x 4 answers" in display and "kl/k3 0.00e+00" in display


def test_a_run_without_a_server_to_sample_from_and_one_whose_prompt_can_not_be_judged_do_not_begin(
    resident: CountingResident, display: Lines, make: Callable[..., Recipe], sampler: SeededSampler
) -> None:
    prompts = [Prompt(np.array([5, 6], np.int32), "q", None, {}, "rows:9")]
    with pytest.raises(InvalidValueError, match="has no HTTP server to sample from"):
        run(resident, make(), Inputs(prompts, {}), display)
    with pytest.raises(InvalidValueError, match="rows:9: no answer"):
        run(resident, make(), Inputs(prompts, {}), display, sampling=Sampling(sampler, FirstToken()))
    with pytest.raises(InvalidValueError, match=r"max_new_tokens: 511: the prompt at rows:9 has 2 tokens"):
        run(resident, make(max_new_tokens=511), Inputs(prompts, {}), display, sampling=Sampling(sampler, FirstToken()))
    assert not sampler.asked
