"""The measurements on a server that is started as users start it: steps, publication to first token, a group's rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kt_runtime.bench.rl.plan import GROUP, LengthIsOdd, Plan, prompts_of, recipe_of
from kt_runtime.bench.train.plan import LEARNING_RATE
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.train.examples import Prompt
from kt_runtime.train.rollouts.sampling import Asked, HttpSampler
from kt_runtime.train.run.session import lora_settings
from kt_runtime.train.stages import batches
from kt_runtime.train.stages.grpo import TIMES, Grpo, Sampling
from kt_runtime.wire import Batch, ResidentClient

CALL_TIMEOUT_S = 3600.0
SESSION, NAME = "bench-rl", "bench-rl-first-token"
PARTS = ("rollout", "forward_backward", "optimizer", "publish", "other")


@dataclass
class Measured:
    """`steps`: seconds of each counted step by `PARTS`. `first_token_ms`: from the call of publish to the version's
    first token; `single_tokens_per_s` and `group_tokens_per_s`: of one answer, and of GROUP answers to one prompt."""

    steps: list[dict[str, float]] = field(default_factory=list)
    largest_k3: float = 0.0
    publish_ms: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    single_tokens_per_s: list[float] = field(default_factory=list)
    group_tokens_per_s: list[float] = field(default_factory=list)


def measure(
    plan: Plan, model: Path, dtype: str, vocabulary: int, directory: Path, say: Callable[[str], None]
) -> Measured:
    """The server has ended on return; its files are in `directory`."""
    options = ["--dtype", dtype, "--context-tokens", str(plan.context_tokens + 64), "--max-lora-rank", str(plan.rank)]
    options += ["--max-total-tokens", str(plan.pool_tokens), "--lora-slots", "4"]
    options += ["--max-running-requests", str(max(GROUP, plan.prompts * plan.generations))]
    options += ["--adapter-dir", str(directory / "adapters")]
    say(f"starting a server in {dtype}")
    with server(str(model), options, directory / "server.log") as api, resident_client(api, CALL_TIMEOUT_S) as client:
        found, prompts = Measured(), prompts_of(plan, vocabulary)
        recipe = recipe_of(plan, directory)
        client.create_session(SESSION, lora_settings(recipe))
        _steps(plan, api, client, prompts, directory, found, say)
        _first_tokens(plan, api, client, prompts[0], found, say)
        _group(plan, api, prompts[-1], found, say)
        client.close_session(SESSION)
    return found


def _steps(
    plan: Plan,
    api: ServerAPI,
    client: ResidentClient,
    prompts: list[Prompt],
    directory: Path,
    found: Measured,
    say: Callable[[str], None],
) -> None:
    recipe, total = recipe_of(plan, directory), plan.warmup_steps + plan.steps
    objective = Grpo(
        client, SESSION, recipe, prompts, total, Sampling(_sampler(api, plan), LengthIsOdd(), exact=True), say
    )
    for step, micro_batches in enumerate(batches.plan(prompts, recipe, total)):
        before, started = dict(objective.seconds), time.perf_counter()
        outcome = objective.accumulate(micro_batches)
        optimizing = time.perf_counter()
        client.optim_step(SESSION, LEARNING_RATE)
        ended = time.perf_counter()
        parts = {name: objective.seconds[name] - before[name] for name in TIMES}
        parts["optimizer"] = ended - optimizing
        parts["other"] = ended - started - sum(parts.values())
        found.largest_k3 = max(found.largest_k3, outcome.metrics["kl/k3"])
        say(f"step {step + 1}/{total}: {ended - started:.2f} s, of which {_shown(parts)}")
        if step >= plan.warmup_steps:
            found.steps.append(parts)
    objective.close()


def _first_tokens(
    plan: Plan, api: ServerAPI, client: ResidentClient, prompt: Prompt, found: Measured, say: Callable[[str], None]
) -> None:
    """The prompt is one token, as the first token of a known prompt needs one forward pass. The first round, in which
    the name is new, is not counted."""
    body = {
        "input_ids": [int(prompt.ids[0])],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 2, "ignore_eos": True},
        "lora_path": NAME,
        "stream": True,
    }
    ids = prompt.ids[:3].tolist()
    batch = Batch.from_sequences([ids[:2]], [ids[1:]])
    with httpx.Client(base_url=api.url, timeout=CALL_TIMEOUT_S, trust_env=False) as http:
        for counted in [False, *[True] * plan.rounds]:
            client.forward_backward(SESSION, batch)  # two tokens, so that there is another version to publish
            client.optim_step(SESSION, LEARNING_RATE)
            started = time.perf_counter()
            client.publish(SESSION, NAME, take_over=True)
            published = time.perf_counter()
            with http.stream("POST", "/generate", json=body) as answer:
                answer.raise_for_status()
                lines = answer.iter_lines()
                next(line for line in lines if line.startswith("data:"))
                arrived = time.perf_counter()
                list(lines)
            if counted:
                found.publish_ms.append(1e3 * (published - started))
                found.first_token_ms.append(1e3 * (arrived - started))
    say(f"publish to first token: {', '.join(f'{value:.0f}' for value in found.first_token_ms)} ms")


def _group(plan: Plan, api: ServerAPI, prompt: Prompt, found: Measured, say: Callable[[str], None]) -> None:
    """Samples one answer, then GROUP answers, with the version that was published last and new seeds in every round."""
    sampler = _sampler(api, plan)
    for round_number in range(plan.rounds + 1):
        for size, rates in ((1, found.single_tokens_per_s), (GROUP, found.group_tokens_per_s)):
            seeds = [1000 * round_number + index for index in range(size)]
            started = time.perf_counter()
            [answers] = sampler.sample(NAME, [Asked(prompt.ids.tolist(), seeds, prompt.where)])
            seconds = time.perf_counter() - started
            if round_number:
                rates.append(sum(len(each.tokens) for each in answers) / seconds)
    api.delete(f"/kt/adapters/{NAME}")
    say(f"tokens/s: {found.single_tokens_per_s} alone, {found.group_tokens_per_s} in a group of {GROUP}")


def _sampler(api: ServerAPI, plan: Plan) -> HttpSampler:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": plan.new_tokens, "ignore_eos": True}
    return HttpSampler(api.url, None, sampling)


def _shown(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {parts[name]:.2f}" for name in PARTS)
