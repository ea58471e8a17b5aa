"""A step of reinforcement learning on a running server: sample from it, weigh the answers, learn, sample again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.parity import NEW_TOKENS, sampled

from kt_runtime.cli.connection import resident_client
from kt_runtime.errors import InvalidValueError, ProtocolError
from kt_runtime.wire import Batch, LoraSettings, PolicyLoss, Samples

pytestmark = pytest.mark.preset("tiny-qwen3-moe")
LOSSES = [PolicyLoss(kind="importance_sampling"), PolicyLoss(kind="ppo"), PolicyLoss(kind="cispo")]
LOSSES += [PolicyLoss(kind="dro", beta=0.05), PolicyLoss(kind="gspo")]


def test_rewarded_answers_become_more_likely_and_the_others_less(float32_server: Any) -> None:
    rows, served = sampled(float32_server.api, None)
    lengths = [len(row) - 1 for row in rows]
    counted = [[0.0] * (length - NEW_TOKENS) + [1.0] * NEW_TOKENS for length in lengths]
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows], counted)
    signs = [1.0 if index % 2 else -1.0 for index in range(len(rows))]
    logprobs = [[0.0] * (length - NEW_TOKENS) + row.tolist() for length, row in zip(lengths, served, strict=True)]
    samples = Samples.from_sequences(logprobs, [[sign] * length for sign, length in zip(signs, lengths, strict=True)])
    with resident_client(float32_server.api) as client:
        for loss in LOSSES:
            client.create_session("rl", LoraSettings(rank=8, alpha=16, targets=["all"], seed=3))
            try:
                first = client.forward_backward("rl", batch, loss, samples=samples)
                tokens = len(rows) * NEW_TOKENS
                assert first.metrics["tokens"] == tokens and first.metrics["clipped"] == 0
                assert first.metrics["kl/k3"] == 0
                client.optim_step("rl", 0.005)
                after = client.forward("rl", batch, loss, samples=samples)
                gained = [
                    float((row[-NEW_TOKENS:] - before).sum())
                    for row, before in zip(after.logprobs, served, strict=True)
                ]
                assert all(gain * sign > 0 for gain, sign in zip(gained, signs, strict=True)), (loss.kind, gained)
                assert after.metrics["kl/k3"] > 0
            finally:
                client.close_session("rl")


def test_what_a_policy_loss_can_not_be_computed_from_is_refused(float32_server: Any) -> None:
    batch = Batch.from_sequences([[5, 6]], [[6, 7]])
    with resident_client(float32_server.api) as client:
        client.create_session("rl", LoraSettings(rank=2, alpha=4, targets=["attention"]))
        try:
            with pytest.raises(ProtocolError, match=r"carries .*'advantages'.*'sampled'"):
                client.forward_backward("rl", batch, PolicyLoss(kind="ppo"))
            samples = Samples(np.array([-1.0, 2.0], np.float32), np.ones(2, np.float32))
            with pytest.raises(InvalidValueError, match=r"sampled\[1\] is 2\.0"):
                client.forward_backward("rl", batch, PolicyLoss(kind="ppo"), samples=samples)
        finally:
            client.close_session("rl")
