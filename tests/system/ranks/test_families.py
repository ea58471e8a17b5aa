"""Real servers of each family whose models ranks share, two ranks against one: tokens and log-probabilities of the base
and of adapters, some steps of a session on all modules, its checkpoint, the version that it publishes; and SGLang's
modules in place of the native step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.checkpoints import mxfp4
from reference.checkpoints.transformers_checkpoint import save
from reference.families import PRESETS
from reference.ranks.sessions import FEWER, STEPS, answers_of, trained

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.families import FAMILIES, family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire.replies import STEP_RUNNING

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
        fingerprint = api.get("/kt/status?verify=true")["fingerprint"]
    assert len({session[f"loss {step}"] for step in range(STEPS)}) == STEPS
    with running(tmp_path, "two", "--tp-size", "2", "--exact") as api:
        assert answers_of(api, tmp_path) == answers
        for name, value in trained(api, tmp_path, "two").items():
            assert value == session[name], name
        status = api.get("/kt/status?verify=true")
        assert status["fingerprint"] == fingerprint  # a registry takes both
        assert (status["step"], status["step_exceptions"], len(status["ranks"])) == (STEP_RUNNING, [], 2)
    with running(tmp_path, "modules", "--tp-size", "2", "--no-step") as api:
        assert answers_of(api, tmp_path, FEWER).items() <= answers.items()
