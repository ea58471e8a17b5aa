"""Routing replay on a running server: routes of what it sampled are found, forced, and those of serving to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reference.parity import NEW_TOKENS, sampled

from kt_runtime.cli.connection import resident_client
from kt_runtime.wire import Batch, LoraSettings, PolicyLoss, ResidentClient, Samples
from kt_runtime.wire.client import ForwardResult

LOSS = PolicyLoss(kind="importance_sampling")
NAME = "replayed"


class Rollout:
    """Answers that the session's published version has sampled, as a client sends them back with a loss."""

    def __init__(self, server: Any, client: ResidentClient) -> None:
        self.client = client
        self.version = client.publish("replay", NAME).version
        rows, served = sampled(server.api, NAME)
        lengths = [len(row) - 1 for row in rows]
        counted = [[0.0] * (length - NEW_TOKENS) + [1.0] * NEW_TOKENS for length in lengths]
        self.batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows], counted)
        logprobs = [[0.0] * (length - NEW_TOKENS) + row.tolist() for length, row in zip(lengths, served, strict=True)]
        signs = [[float(index % 2) - 0.5] * length for index, length in enumerate(lengths)]
        self.samples = Samples.from_sequences(logprobs, signs)

    def forward(self, replay: Any, version: str | None = None) -> ForwardResult:
        return self.client.forward(
            "replay", self.batch, LOSS, samples=self.samples, routing_replay=replay, rollout_version=version
        )

    def learn(self, replay: Any, steps: int, learning_rate: float) -> list[dict[str, float]]:
        found = []
        for _ in range(steps):
            result = self.client.forward_backward(
                "replay", self.batch, LOSS, samples=self.samples, routing_replay=replay
            )
            self.client.optim_step("replay", learning_rate, max_grad_norm=1.0)
            found.append(result.metrics)
        return found


def logprobs(result: ForwardResult) -> np.ndarray:
    return np.concatenate(result.logprobs)


def test_off_policy_steps_train_with_the_experts_that_sampling_chose(float32_server: Any, tmp_path: Path) -> None:
    """`compare` finds no moved token before the steps: the kept routes are those that training computes, which has the
    log-probabilities of serving to the bit. With the old weights a replay gives these bits again."""
    with resident_client(float32_server.api) as client:
        client.create_session("replay", LoraSettings(rank=8, alpha=16, targets=["all"], seed=3))
        try:
            client.forward_backward("replay", Batch.from_sequences([[5, 6, 7]], [[6, 7, 8]]))
            client.optim_step("replay", 0.01)
            rollout = Rollout(float32_server, client)
            tokens = rollout.batch.num_tokens
            before = rollout.forward("compare")
            assert (before.metrics["routes/missed"], before.metrics["routes/moved"]) == (0, 0)
            assert before.metrics["kl/k3"] == 0
            client.save("replay", str(tmp_path / "before"))
            metrics = rollout.learn("rollout", steps=4, learning_rate=0.02)
            assert [each["routes/replayed"] for each in metrics] == [tokens] * 4
            assert [each["routes/missed"] for each in metrics] == [0] * 4
            assert metrics[0]["routes/moved"] == 0 == metrics[0]["kl/k3"] and metrics[-1]["routes/moved"] > 0
            live, compared, forced = (rollout.forward(replay) for replay in ("off", "compare", "rollout"))
            assert not any(name.startswith("routes/") for name in live.metrics)
            assert np.array_equal(logprobs(live), logprobs(compared))
            assert 0 < compared.metrics["routes/moved"] <= tokens
            assert not np.array_equal(logprobs(live), logprobs(forced))
            assert np.array_equal(logprobs(forced), logprobs(rollout.forward("rollout", rollout.version)))
            unknown = rollout.forward("rollout", "0" * 64)
            assert unknown.metrics["routes/missed"] == tokens
            assert np.array_equal(logprobs(live), logprobs(unknown))
            client.load("replay", str(tmp_path / "before"))
            assert np.array_equal(logprobs(rollout.forward("rollout")), logprobs(before))
            kept = client.status().kept_routes
            assert kept is not None and kept.tokens >= tokens and kept.size_bytes == 16 << 20
        finally:
            client.close_session("replay")
            float32_server.api.delete(f"/kt/adapters/{NAME}")


def test_a_session_that_published_nothing_replays_what_the_base_sampled(float32_server: Any) -> None:
    rows, _ = sampled(float32_server.api, None)
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    with resident_client(float32_server.api) as client:
        client.create_session("replay", LoraSettings(rank=4, alpha=8, targets=["attention"], seed=3))
        try:
            found = client.forward("replay", batch, routing_replay="rollout")
            assert found.metrics["routes/replayed"] == batch.num_tokens and found.metrics["routes/moved"] == 0
            whole = Batch.from_sequences(rows, [[*row[1:], 3] for row in rows])
            last = client.forward("replay", whole, routing_replay="rollout").metrics
            assert last["routes/missed"] == len(rows)  # of each answer the last token, which nobody has computed
        finally:
            client.close_session("replay")
