"""Real servers of each family whose models ranks share, two ranks against one: tokens and log-probabilities of the base
and of adapters, ten steps of a session on all modules, its checkpoint, the version that it publishes; and SGLang's
modules in place of the native step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.checkpoints import mxfp4
from reference.checkpoints.transformers_checkpoint import save
from reference.families import PRESETS
from reference.server.greedy import Answer, ask

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.families import FAMILIES, family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings
from kt_runtime.wire.replies import STEP_RUNNING

STEPS = 10
LENGTHS = (1, 7, 33, 150)  # in chunks of 64 tokens, windows of 16 and chunks of attention of 48
SPLIT = [family.name for family in FAMILIES if family.splits_over_ranks and family.name != "qwen3_moe"]
FEW = ["glm4_moe", "gpt_oss"]  # dense layers, shared experts, biases, sinks, windows
USUAL = [*FEW, "olmoe", "deepseek_v3", "qwen3_5_moe_text"]
"""SGLang's modules of OLMoE sum up over ranks themselves; latent attention; Gated DeltaNet."""


@contextlib.contextmanager
def running(directory: Path, name: str, *options: str) -> Iterator[ServerAPI]:
    arguments = ["--expert-threads", "1", "--max-lora-rank", "8", "--adapter-dir", str(directory / f"{name}-adapters")]
    config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
    pages = [] if family_for(config).keeps_states else ["--page-size", "8"]
    passed_on = ["--", "--chunked-prefill-size", "64", *pages]
    with server(str(directory / "model"), [*arguments, *options, *passed_on], directory / f"{name}.log") as api:
        yield api


def answers_of(api: ServerAPI, directory: Path) -> list[Answer]:
    """Of the base and of an adapter on all modules, alone and in one batch."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 700, (length,), generator=generator).tolist() for length in LENGTHS]
    api.post("/kt/adapters", {"name": "given", "path": str(directory / "given")})
    found = [ask(api, prompt) for prompt in prompts]
    with ThreadPoolExecutor(2 * len(LENGTHS)) as pool:
        asked = [pool.submit(ask, api, [5, *prompt], name) for prompt in prompts for name in (None, "given")]
        return [*found, *(each.result() for each in asked)]


def trained(api: ServerAPI, directory: Path, name: str) -> dict[str, Any]:
    """What a client sees of ten steps, and the checkpoint's files."""
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


@pytest.mark.parametrize("family", choose(few=FEW, usual=USUAL, every=SPLIT))
def test_two_ranks_have_the_bits_of_one(tmp_path: Path, family: str) -> None:
    config = PRESETS[family].config
    if family == "gpt_oss":
        mxfp4.quantize_experts(
            save(PRESETS[family], tmp_path / "model", torch.bfloat16, fused=True)
        )  # as it is published
    else:
        make_model(PRESETS[family], tmp_path / "model", seed=6)
    lora.write_adapter(tmp_path / "given", lora.random_adapter(config, rank=6, alpha=12.0, seed=2))
    with running(tmp_path, "one") as api:
        answers, session = answers_of(api, tmp_path), trained(api, tmp_path, "one")
    assert len({session[f"loss {step}"] for step in range(STEPS)}) == STEPS
    with running(tmp_path, "two", "--tp-size", "2", "--exact") as api:
        assert answers_of(api, tmp_path) == answers
        for name, value in trained(api, tmp_path, "two").items():
            assert value == session[name], name
        status = api.get("/kt/status")
        assert (status["step"], status["step_exceptions"], len(status["ranks"])) == (STEP_RUNNING, [], 2)
    with running(tmp_path, "modules", "--tp-size", "2", "--no-step") as api:
        assert answers_of(api, tmp_path) == answers
