"""Every family in SGLang's own scheduler, from a checkpoint that transformers wrote: against Hugging Face in float32,
and training against serving, bit by bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import lora
from reference.cases import choose
from reference.checkpoints import mxfp4
from reference.checkpoints.transformers_checkpoint import build, save
from reference.delta_net import hugging_face_in_float64
from reference.families import PRESETS
from reference.resident.native_step import installed, prompt
from reference.resident.scheduler import Engine, engine
from reference.server.greedy import logprobs_of

from kt_runtime.adapters import AdapterTensors
from kt_runtime.families import resolve_targets
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training.session import Session
from kt_runtime.resident.twin.batches import TrainingBatch
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin
from kt_runtime.sglang_patch.cache.namespace import named_tensors
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.wire.messages import CrossEntropy, LoraSettings
from kt_runtime.wire.replies import STEP_RUNNING

LENGTHS = (2, 9, 70, 150)  # in chunks of 64 tokens
# float32, sums in another order: 3.9e-6 measured, with adapters 1.9e-5 (AMX, AVX2, portable). Recurrent states and
# GLM-4.7-Flash's attention: 4.0e-5 and 8.3e-5.
LOGPROB_TOLERANCE, ADAPTED_TOLERANCE = 3e-5, 1e-4
LARGER = dict.fromkeys(("glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text"), 3.0)
RANK, ALPHA = 4, 6.0
Answers = tuple[list[list[int]], list[np.ndarray]]
QUANTIZED = "gpt_oss, MXFP4"  # experts as its published checkpoints have them; Hugging Face's have what they mean


@dataclass(frozen=True)
class Running:
    """A family's engine, its twin over the engine's tensors, and Hugging Face's model of the same weights."""

    engine: Engine
    twin: Twin
    modules: LoraModules
    hugging_face: Any
    keys: Iterator[int] = field(default_factory=itertools.count)
    answers: list[Answers] = field(default_factory=list)

    @property
    def base(self) -> Answers:
        """What `served` gives without an adapter, computed once."""
        if not self.answers:
            self.answers.append(served(self))
        return self.answers[0]

    def trained(self, rows: list[list[int]], adapter: AdapterTensors | None = None) -> list[np.ndarray]:
        """Training's log-probabilities of each row's tokens but the first."""
        session = self._session(adapter)
        batch = TrainingBatch(
            [len(row) - 1 for row in rows],
            np.concatenate([row[:-1] for row in rows]).astype(np.int32),
            np.concatenate([row[1:] for row in rows]).astype(np.int32),
            np.ones(sum(len(row) - 1 for row in rows), np.float32),
        )
        found = np.asarray(run_at_once(session.forward(batch, CrossEntropy(), 64)).logprobs)
        return np.split(found, np.cumsum([len(row) - 1 for row in rows])[:-1])

    def _session(self, adapter: AdapterTensors | None) -> Session:
        """Of `adapter`; None: of one that changes nothing."""
        targets = ["all"] if adapter is None else adapter.targets
        settings = LoraSettings(rank=RANK, alpha=ALPHA, targets=targets, seed=1)
        modules = resolve_targets(self.engine.config, targets)
        masters: dict[str, torch.Tensor] = {}
        for module in modules:
            stack = (module.num_experts,) if module.num_experts else ()
            a = torch.zeros(*stack, RANK, module.in_features)
            b = torch.zeros(*stack, module.out_features, RANK)
            if adapter is not None and module.name in adapter.modules:
                a, b = adapter.modules[module.name]
            masters |= {f"{module.name}.lora_A": a.clone(), f"{module.name}.lora_B": b.clone()}
        key = f"session {next(self.keys)}"
        placing = self.modules.create(key, modules, masters, rank=RANK, alpha=ALPHA, dropout=0.0)
        return Session(key, key, self.twin, self.modules, modules, settings, run_at_once(placing))


@contextlib.contextmanager
def started(family: str, directory: Path, dtype: torch.dtype) -> Iterator[Running]:
    """The checkpoint is in float32, its experts fused."""
    preset = PRESETS[family.partition(",")[0]]
    save(preset, directory, torch.float32, fused=True, seed=5)
    hugging_face = build(preset, seed=5)
    if family == QUANTIZED:
        hugging_face.load_state_dict(mxfp4.quantize_experts(directory), strict=False)
    with engine(directory, "--dtype", str(dtype).removeprefix("torch.")) as running:
        runner = running.scheduler.tp_worker.model_runner
        host: Any = SimpleNamespace(
            config=running.config,
            device=torch.device("cpu"),
            dtype=dtype,
            experts=expert_store(),
            attends_in_float32=True,
            exchange=None,
            tensors=lambda: named_tensors(runner.model),
        )
        twin = Twin(host)
        assert twin.copied_bytes == 0
        yield Running(running, twin, LoraModules(twin), hugging_face)


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, patched_sglang: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    family, dtype = request.param
    with started(family, tmp_path_factory.mktemp("model") / "m", dtype) as engine:
        yield engine


def each(families: Iterable[str], dtype: torch.dtype) -> pytest.MarkDecorator:
    """`running` is each of the families in `dtype`; tests share it."""
    cases = [(family, dtype) for family in families]
    return pytest.mark.parametrize("running", cases, indirect=True, ids=[f"{family}-{dtype}" for family in families])


EVERY = [*PRESETS, QUANTIZED]
# Grouped-query and latent attention. Each family takes two seconds.
every_family = each(choose(few=["qwen3_moe", "deepseek_v3"], usual=EVERY, every=EVERY), torch.float32)


def served(running: Running, lora_id: str | None = None) -> Answers:
    """Prompts with greedy answers, and the served log-probabilities of all tokens but the first."""
    engine = running.engine
    engine.clear()
    prompts = {f"r{length}": prompt(length, length) for length in LENGTHS}
    engine.run(*(engine.request(rid, tokens, logprob_start_len=0, lora_id=lora_id) for rid, tokens in prompts.items()))
    rows = [tokens + engine.tokens[rid] for rid, tokens in prompts.items()]
    logprobs = [np.array(engine.prompt_logprobs[rid] + engine.logprobs[rid], np.float32) for rid in prompts]
    return rows, logprobs


@every_family
def test_served_logprobs_equal_hugging_face_s(running: Running) -> None:
    rows, logprobs = running.base
    tolerance = LOGPROB_TOLERANCE * LARGER.get(running.engine.config["model_type"], 1.0)
    for row, found in zip(rows, logprobs, strict=True):
        with hugging_face_in_float64():
            expected = logprobs_of(running.hugging_face, row)
        assert np.std(expected) > 0.1
        assert np.abs(found - expected).max() <= tolerance


@every_family
def test_the_native_step_computes_the_family(running: Running) -> None:
    assert running.base
    assert native_step.state() == STEP_RUNNING
    assert native_step.exceptions() == []


@every_family
def test_training_s_logprobs_are_the_served_ones(running: Running) -> None:
    rows, logprobs = running.base
    assert all(np.array_equal(a, b) for a, b in zip(running.trained(rows), logprobs, strict=True))


@pytest.mark.parametrize("only", [(), ("experts",)])
@every_family
def test_with_an_adapter_training_s_logprobs_are_the_served_ones(running: Running, only: tuple[str, ...]) -> None:
    """And those of Hugging Face's model with the adapter merged."""
    base, _ = running.base
    adapter = lora.random_adapter(running.engine.config, rank=RANK, alpha=ALPHA, seed=2, only=only)
    with installed(running.engine, one=adapter):
        rows, logprobs = served(running, "one")
    assert rows != base
    assert all(np.array_equal(a, b) for a, b in zip(running.trained(rows, adapter), logprobs, strict=True))
    merged = lora.merge(copy.deepcopy(running.hugging_face), adapter)
    tolerance = ADAPTED_TOLERANCE * LARGER.get(running.engine.config["model_type"], 1.0)
    for row, found in zip(rows, logprobs, strict=True):
        with hugging_face_in_float64():
            assert np.abs(found - logprobs_of(merged, row)).max() <= tolerance


# The others' bfloat16 is tested in the system tests.
FAMILIES_IN_BF16 = (
    "mixtral",
    "olmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m2",
    "llama4_text",
    "qwen3_next",
    "qwen3_5_moe_text",
    QUANTIZED,
)


@pytest.mark.slow
@each(
    choose(few=("qwen3_next", QUANTIZED), usual=FAMILIES_IN_BF16, every=FAMILIES_IN_BF16),
    torch.bfloat16,
)
def test_in_bfloat16_training_s_logprobs_are_the_served_ones(running: Running) -> None:
    rows, logprobs = running.base
    assert all(np.array_equal(a, b) for a, b in zip(running.trained(rows), logprobs, strict=True))
    adapter = lora.random_adapter(running.engine.config, rank=RANK, alpha=ALPHA, seed=2)
    with installed(running.engine, one=adapter):
        adapted, logprobs = served(running, "one")
    assert adapted != rows and native_step.exceptions() == []
    assert all(np.array_equal(a, b) for a, b in zip(running.trained(adapted, adapter), logprobs, strict=True))
