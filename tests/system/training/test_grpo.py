"""Reinforcement learning on a running server by `kt-runtime train`: rewards rise, k3 is 0, kill -9 changes nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from reference.server import signalled
from reference.server.command_line import run_command
from reference.server.streams import reading_streams
from system.conftest import random_prompt
from system.forked_server import start_command

from kt_runtime.cli.main import main

pytestmark = pytest.mark.preset("tiny-qwen3-moe")

REWARD = """\
def judge(completion, prompt, answer, weight):
    assert prompt.startswith("Continue: ")
    return weight * sum(letter == answer for letter in completion) / max(len(completion), 1)
"""
RECIPE = """\
stage: grpo
reward: rewards.py:judge
lora_rank: 8
dataset: toy
rollout_batch_size: 4
num_generations: 8
max_new_tokens: 4
learning_rate: 1.0e-2
lr_scheduler_type: constant
logging_steps: 1
save_steps: 2
plot_loss: true
"""


@pytest.fixture
def recipe(tmp_path: Path, float32_server: Any) -> Path:
    """A toy task beside its recipe: continue with the letter, which costs an untrained model a few percent."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data").mkdir()
    rows = [{"instruction": f"Continue: {' '.join(8 * letter)}", "output": letter, "weight": 1.0} for letter in "aeho"]
    (tmp_path / "data" / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "toy.jsonl"}}))
    path = tmp_path / "grpo.yaml"
    path.write_text(
        f"dataset_dir: {tmp_path / 'data'}\n"
        + RECIPE
        + f"model_name_or_path: {float32_server.model_directory}\noutput_dir: {tmp_path / 'out'}\n"
    )
    return path


def arguments(recipe: Path, server: Any, *overrides: str) -> list[str]:
    return ["train", str(recipe), "--url", server.api.url, *overrides]


def history(out: Path) -> list[dict[str, Any]]:
    """Without times, of which two runs have different ones."""
    lines = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    timed = ("elapsed_time", "remaining_time", "throughput", "rollout_version")
    return [{k: v for k, v in line.items() if not k.startswith("time/") and k not in timed} for line in lines]


def names(server: Any) -> list[str]:
    return [adapter["name"] for adapter in server.api.get("/kt/adapters")["adapters"] if adapter["current"]]


def test_rewards_rise_and_sampling_is_training_to_the_bit(
    recipe: Path, float32_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(float32_server)
    status = main(arguments(recipe, float32_server, "max_steps=10"))
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    lines = history(tmp_path / "out")
    assert [line["kl/k3"] for line in lines] == [0.0] * 10 and "warning" not in said.out
    assert max(line["reward"] for line in lines[-3:]) > 1.5 * lines[0]["reward"]
    assert [line["rollout/lag"] for line in lines] == [0.0] * 10
    assert names(float32_server) == before  # the rollouts' own name is gone
    for file in ("adapter_model.safetensors", "training_reward.png", "training_kl_k3.png", "checkpoint-10"):
        assert (tmp_path / "out" / file).exists()


def test_greedy_streams_of_other_users_keep_their_tokens_during_a_run(
    recipe: Path, float32_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with reading_streams(float32_server.api.url, [random_prompt(seed, 9 + 20 * seed) for seed in range(3)]) as streams:
        status = main(arguments(recipe, float32_server, "max_steps=5"))
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    assert streams.failures == [] and streams.changed == []
    assert len(streams.answers) > len(streams.expected)  # some began and ended during the run
    assert [line["kl/k3"] for line in history(tmp_path / "out")] == [0.0] * 5


def test_a_rollout_s_later_steps_replay_its_routes(recipe: Path, float32_server: Any, tmp_path: Path) -> None:
    keys = ["max_steps=4", "steps_per_rollout=2", "async_rollouts=true", "routing_replay=rollout", "save_steps=4"]
    assert main(arguments(recipe, float32_server, *keys)) == 0
    lines = history(tmp_path / "out")
    assert [(line["routes/replayed"], line["routes/missed"]) for line in lines] == [(1.0, 0.0)] * 4
    assert lines[0]["routes/moved"] == 0 and max(line["routes/moved"] for line in lines) > 0


def test_a_seed_samples_the_same_answer_alone_and_beside_others(float32_server: Any) -> None:
    def answers(prompts: list[list[int]], seeds: list[int | None]) -> list[list[int]]:
        settings = [
            {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
            | ({} if seed is None else {"sampling_seed": seed})
            for seed in seeds
        ]
        found = float32_server.api.post("/generate", {"input_ids": prompts, "sampling_params": settings})
        return [answer["output_ids"] for answer in found]

    prompts = [[5, 6, 7], [8, 9], [5, 6, 7], [5, 6, 7]]
    together = answers(prompts, [3, 4, 3, None])
    assert together[0] == together[2] != together[3]
    assert answers([[5, 6, 7]], [3]) == together[:1] and answers([[8, 9]], [4]) == together[1:2]
    assert answers([[5, 6, 7]], [5]) != together[:1]


def test_a_run_that_was_killed_between_steps_of_a_rollout_continues_with_the_same_rewards(
    recipe: Path, float32_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(float32_server)
    keys = ["max_steps=8", "steps_per_rollout=4", "save_steps=1", "async_rollouts=true"]
    assert main(arguments(recipe, float32_server, *keys, f"output_dir={tmp_path / 'whole'}")) == 0
    monkeypatch.chdir(tmp_path)
    killed = start_command(arguments(recipe, float32_server, *keys), **signalled.after("step 6/8", signal.SIGKILL))
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = run_command(*arguments(recipe, float32_server, *keys), directory=tmp_path)
    assert again.returncode == 0 and "resumed" in again.stdout, again.stdout + again.stderr
    assert history(tmp_path / "out") == history(tmp_path / "whole")
    files = [(tmp_path / run / "adapter_model.safetensors").read_bytes() for run in ("whole", "out")]
    assert files[0] == files[1]
    lags = [line["rollout/lag"] for line in history(tmp_path / "out")]
    assert lags == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert names(float32_server) == before  # the killed run's name is gone, too


def test_what_a_reward_does_wrong_is_said_with_line_and_row(
    recipe: Path, float32_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(float32_server)
    (tmp_path / "rewards.py").write_text("def judge(completion, weight):\n    return weight / 0\n")
    assert main(arguments(recipe, float32_server, "max_steps=2")) == 2
    said = capsys.readouterr().err
    assert "rewards.py:2: judge raised ZeroDivisionError" in said and "toy.jsonl:" in said
    assert names(float32_server) == before
