"""Random batches in SGLang's own scheduler: training computes the log-probabilities of all of them, bit by bit.

For every family, format of the experts and instruction set at hand, in pairs: each two of them meet in a case, all
three with `TEST_CASES=all`. Batches have prompts in chunks with random cuts, cached prefixes, decodes, both in one
batch, the base and adapters of several ranks side by side.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from reference import lora
from reference.cases import choose, in_pairs
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.parity import Agreement, mean_k3, tiny_deepseek_v2
from reference.quantized import SCHEMES
from reference.resident.one_at_a_time import OneAtATime
from reference.resident.scheduler import Engine, engine, patch_sglang
from reference.server.random_traffic import Traffic, Trainer

from kt_runtime.experts import available_isas, dense
from kt_runtime.resident.training import loss_slices
from kt_runtime.resident.training.losses import log_softmax
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.lora.install import install_adapter
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.wire.replies import STEP_RUNNING

BATCHES, FEWER_BATCHES = choose(few=20, usual=20, every=64), 20
OPTIONS = (
    "--log-level",
    "warning",
    "--enable-mixed-chunk",
    "--max-total-tokens",
    "1024",
)  # so few that cached prefixes are evicted
PRESETS = {
    "qwen3_moe": load_preset("tiny-qwen3-moe"),
    "deepseek_v2": tiny_deepseek_v2(),
    "deepseek_v3": load_preset("tiny-deepseek-v3"),
}
HYBRIDS = {"qwen3_next": load_preset("tiny-qwen3-next"), "qwen3_5_moe_text": load_preset("tiny-qwen3-5-moe-text")}
FP8_BLOCK = {"moe_intermediate_size": 128}
SCHEME_OF = {scheme.format: name for name, scheme in reversed(SCHEMES.items())}
ISAS = available_isas()
# By kernel: a format's encoding, its scales by row, group or block, zero points or none.
FORMATS = ("bf16", "fp8_e4m3", "fp8_e4m3_g128", "int8", "int8_g128_zp", "int4", "int4_g32_zp")
MORE_FORMATS = tuple(sorted(SCHEME_OF.keys() - set(FORMATS)))  # other sizes of a group
_AXES: tuple[tuple[str, ...], ...] = (tuple(PRESETS), FORMATS, tuple(ISAS))
_EVERY: list[tuple[str, ...]] = list(itertools.product(*_AXES))
CASES = choose(few=in_pairs(*_AXES), usual=in_pairs(*_AXES), every=_EVERY)
IN_TURN = [(held, ISAS[place % len(ISAS)]) for place, held in enumerate(["bf16", *MORE_FORMATS])]
BFLOAT16, FLOAT32 = ([(family, dtype) for family in PRESETS] for dtype in ("bfloat16", "float32"))
TRAINED = ("bf16", "int8")
DENSE_MODULES = ("q_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_proj", "mlp", "in_proj_qkvz", "in_proj_z")


EQUAL = Agreement(0.0, 0.0)


@dataclass
class Model:
    """An engine with three adapters, and checkpoints of its experts in every format."""

    family: str
    engine: Engine
    place: Path
    adapters: dict[str, Any] = field(default_factory=dict)

    def checkpoint(self, scheme: str) -> Path:
        if SCHEMES[scheme].config is None:
            return self.place / "model"
        place = self.place / scheme
        if not place.exists():
            place.mkdir()
            quantize_checkpoint(self.place / "model", place, scheme, experts_only=True)
        return place / "quantized"


Models = OneAtATime[tuple[str, str], Model]
"""By family and dtype."""


@contextlib.contextmanager
def started_model(family: str, dtype: str, place: Path) -> Iterator[Model]:
    preset = (PRESETS | HYBRIDS)[family]
    make_model(msgspec.structs.replace(preset, config=preset.config | FP8_BLOCK), place / "model", seed=3)
    with engine(place / "model", "--dtype", dtype, *OPTIONS) as started:
        made = Model(family, started, place)
        for name, rank, only in (("all", 8, ()), ("dense", 3, DENSE_MODULES), ("experts", 5, ["experts"])):
            adapter = lora.random_adapter(started.config, rank=rank, alpha=10 / 3, seed=rank, only=only)
            manager = started.scheduler.tp_worker.model_runner.lora_manager
            install_adapter(manager, started.config, name, name, f"content of {name}", adapter)
            made.adapters[name] = adapter
        gc.collect()
        gc.freeze()  # SGLang collects garbage whenever its cache is cleared, over all that it has imported
        yield made
    dense.configure()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    patch_sglang()
    with contextlib.closing(Models(lambda case: started_model(*case, tmp_path_factory.mktemp("model")))) as made:
        yield made


@pytest.fixture
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models.of(request.param)


def run_batches(model: Model, held: str, isa: str, num_batches: int = BATCHES) -> Traffic:
    """Random batches, all computed by the step. Prints the seed."""
    model.engine.load_experts(model.checkpoint(SCHEME_OF[held]), isa=isa)
    assert expert_store().isa == isa and expert_store().format == held
    assert native_step.state() == STEP_RUNNING
    exceptions, seed = native_step.exceptions(), zlib.crc32(f"{model.family} {held} {isa}".encode())
    traffic = Traffic(model.engine, model.adapters, seed)
    traffic.run(num_batches)
    print(
        f"seed {seed}: {len(traffic.rows())} requests in {dict(traffic.modes)} batches, up to {traffic.most_models} "
        f"models in one, {traffic.chunks} more chunks of prompts, {traffic.cached_tokens} cached tokens"
    )
    assert native_step.exceptions() == exceptions
    assert sum(traffic.modes.values()) >= num_batches and traffic.modes.keys() == {"EXTEND", "MIXED", "DECODE"}
    assert traffic.most_models > 2 and traffic.chunks > 0 and traffic.cached_tokens > 0
    return traffic


def agreement(traffic: Traffic, trained: Mapping[str, torch.Tensor]) -> Agreement:
    """Of all that SGLang answered, and of the rows of all batches. `trained`: as `Trainer.logprobs`."""
    rows = traffic.rows()
    pairs = [(trained[rid][place - 1].item(), value) for rid, place, value in traffic.served() if rid in trained]
    assert pairs
    for seen in traffic.seen:
        tokens = rows[seen.rid].tokens
        if seen.rid in trained and seen.num_tokens < len(tokens):
            value = seen.logprobs[tokens[seen.num_tokens]].item()
            pairs.append((trained[seen.rid][seen.num_tokens - 1].item(), value))
    in_training, in_serving = np.array(pairs).T
    difference = in_training - in_serving
    found = Agreement(mean_k3(difference), float(np.abs(difference).max()))
    print(f"{len(pairs)} log-probabilities: {found}")
    return found


@pytest.mark.parametrize("model", BFLOAT16[:1], ids="-".join, indirect=True)
def test_sums_in_another_order_would_be_noticed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_another_order(hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _ = log_softmax(hidden, head)
        return logits, logits - logits.flip(-1).logsumexp(-1, keepdim=True)

    traffic = run_batches(model, "bf16", ISAS[0])
    trainer = Trainer(model.engine, model.adapters)
    monkeypatch.setattr(loss_slices, "log_softmax", in_another_order)
    found = agreement(traffic, trainer.logprobs(traffic.rows(), max_tokens=77))
    assert 0 < found.largest < 5e-6  # 5.4e-7 measured with AMX, 9.5e-7 with all others


@pytest.mark.parametrize(
    ("model", "held", "isa"),
    [((family, "bfloat16"), held, isa) for family, held, isa in CASES],
    ids=["-".join(case) for case in CASES],
    indirect=["model"],
)
def test_training_has_the_logprobs_of_random_batches(model: Model, held: str, isa: str) -> None:
    check_batches(model, held, isa)


@pytest.mark.parametrize("model", [(family, "bfloat16") for family in HYBRIDS], ids="-".join, indirect=True)
def test_training_has_the_logprobs_of_random_batches_of_hybrids(model: Model) -> None:
    """Whose experts and their formats are those of the others."""
    check_batches(model, "bf16", ISAS[0])


@pytest.mark.parametrize(("held", "isa"), IN_TURN)
@pytest.mark.parametrize("model", FLOAT32, ids="-".join, indirect=True)
def test_training_has_the_logprobs_of_random_batches_in_float32(model: Model, held: str, isa: str) -> None:
    check_batches(model, held, isa, FEWER_BATCHES)


def check_batches(model: Model, held: str, isa: str, num_batches: int = BATCHES) -> None:
    """Of `forward`, and with some formats of training steps too, with both ways to keep activations."""
    traffic = run_batches(model, held, isa, num_batches)
    rows, trainer = traffic.rows(), Trainer(model.engine, model.adapters)
    assert agreement(traffic, trainer.logprobs(rows, max_tokens=160)) == EQUAL
    if held in TRAINED:
        adapted = {rid: row for rid, row in rows.items() if row.adapter}
        for activations in ("recompute", "retain"):
            assert agreement(traffic, trainer.logprobs(adapted, max_tokens=300, activations=activations)) == EQUAL
