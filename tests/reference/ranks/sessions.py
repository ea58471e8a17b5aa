"""What clients of a server of ranks see, to be compared with one rank's bit for bit: answers, and a session."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.cases import choose
from reference.server.greedy import Answer, ask

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

STEPS = choose(few=4, usual=4, every=10)
"""With and without a bound of the gradient, from fresh optimizer states and from others. Ten steps of each format of
weights: system/ranks/test_training.py."""
LENGTHS = (1, 7, 33, 150)  # in chunks of 64 tokens, windows of 16 and chunks of attention of 48


FEWER = (7, 150)
"""Enough for SGLang's modules in place of the native step: several rows at once, one, and chunks."""


def answers_of(api: ServerAPI, directory: Path, lengths: Sequence[int] = LENGTHS) -> dict[tuple[Any, ...], Answer]:
    """Of the base and of an adapter on all modules, alone and in one batch. By length, and in a batch by name."""
    generator = torch.Generator().manual_seed(1)
    prompts = {length: torch.randint(3, 700, (length,), generator=generator).tolist() for length in LENGTHS}
    api.post("/kt/adapters", {"name": "given", "path": str(directory / "given")})
    found: dict[tuple[Any, ...], Answer] = {(length,): ask(api, prompts[length]) for length in lengths}
    with ThreadPoolExecutor(2 * len(lengths)) as pool:
        asked = {
            (length, name): pool.submit(ask, api, [5, *prompts[length]], name)
            for length in lengths
            for name in (None, "given")
        }
        return found | {what: each.result() for what, each in asked.items()}


def trained(api: ServerAPI, directory: Path, name: str) -> dict[str, Any]:
    """What a client sees of its steps, and the checkpoint's files."""
    random = np.random.default_rng(5)
    rows = [random.integers(3, 700, length).tolist() for length in (80, 21, 8)]
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    found: dict[str, Any] = {}
    with resident_client(api) as client:
        client.create_session("all", LoraSettings(rank=4, alpha=8.0, targets=["all"], dropout=0.1, seed=5))
        for step in range(STEPS):
            found[f"loss {step}"] = client.forward_backward("all", batch).loss
            found[f"norm {step}"] = client.optim_step("all", 0.01, max_grad_norm=0.5 * (step % 2)).grad_norm
        client.save("all", str(directory / name))
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            found[file] = (directory / name / file).read_bytes()
        found["version"] = client.publish("all", "all").version
        tokens, served = ask(api, rows[0], "all")
        found["answer"] = (tokens, served)
        whole = rows[0] + tokens
        again = client.forward("all", Batch.from_sequences([whole[:-1]], [whole[1:]])).logprobs[0]
        assert again.tolist() == served
    return found
