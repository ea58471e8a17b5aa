"""Experts in each format of a checkpoint, and in each of GGUF's types, in SGLang's own scheduler: against Hugging Face
in float32 with the weights that the checkpoint stands for; in bfloat16 training against serving, bit by bit.

One engine for each dtype computes with the experts of each checkpoint in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from reference import lora
from reference.cases import choose
from reference.checkpoints.gguf_models import dequantized, requantize
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.quantized import SCHEMES
from reference.resident.native_step import installed, prompt
from reference.resident.scheduler import Engine, engine
from reference.server.greedy import load_hugging_face, logprobs_of
from reference.server.random_traffic import Row, Trainer

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.experts.formats import CHECKPOINT_FORMATS
from kt_runtime.families.gguf import EXPERT_TYPES, packed_name
from kt_runtime.serve.models.gguf_model import gguf_directory
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.wire.replies import STEP_RUNNING

LENGTHS = (9, 70)
FLOAT32_TOLERANCE = 4e-5  # of a log-probability; 4e-6 was measured: sums in another order
# What bf16 itself, and activations in int8, cost a model this small, as a mean: 0.034 measured.
BFLOAT16_TOLERANCE = 0.08
LOADED = (
    *("int8", "fp8", "fp8_channel", "int4_g32", "gptq_int4_g32", "awq_g128"),
    *("nvfp4", "mxfp4", "mxfp8"),
)
# A layer's gate and up, and its down: all of GGUF's types in two files.
IN_GGUF = {
    "GGUF, types by 32": [("Q8_0", "Q4_0"), ("Q5_0", "MXFP4"), ("IQ4_NL", "Q8_0")],
    "GGUF, types by 256": [("Q4_K", "Q6_K"), ("Q6_K", "Q5_K"), ("IQ4_XS", "Q4_K")],
}


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose experts the engines load, the same weights in float32, and the store's name of the format."""

    quantized: Path
    plain: Path
    held: str


@pytest.fixture(scope="module")
def bf16(patched_sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sizes are whole blocks of the K types."""
    preset = load_preset("tiny-qwen3-moe")
    wide = {**preset.config, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4}
    return make_model(msgspec.structs.replace(preset, config=wide), tmp_path_factory.mktemp("bf16") / "model", seed=6)


@pytest.fixture(scope="module")
def stored(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stored]:
    """stored(name) -> the checkpoint: written once for both engines."""

    @functools.cache
    def written(name: str) -> Stored:
        place = tmp_path_factory.mktemp("stored")
        if name in SCHEMES:
            return Stored(*quantize_checkpoint(bf16, place, name, experts_only=True), SCHEMES[name].format)
        types: dict[str, str] = {}
        for layer, (gate, down) in enumerate(IN_GGUF[name]):
            parts = {"gate": gate, "up": gate, "down": down}
            types |= {f"blk.{layer}.ffn_{part}_exps": kind for part, kind in parts.items()}
        write_gguf_model(bf16, place / "bf16.gguf")
        requantize(place / "bf16.gguf", place / "m.gguf", types)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
            directory = gguf_directory(place / "m.gguf")
        held = "+".join(sorted({packed_name(kind) for kind in types.values()}))
        return Stored(directory, dequantized(bf16, place / "m.gguf", place / "plain"), held)

    return written


def test_every_method_and_every_type_of_a_gguf_file_is_loaded_here() -> None:
    """But for other names of the same tensors, and fused MXFP4: gpt-oss's experts are in ../test_families.py."""
    configs = [SCHEMES[name].config or {} for name in LOADED]
    methods = {str(config.get("format") or config["quant_method"]) for config in configs}
    others = {"none", "naive-quantized", "mxfp4", "NVFP4", "mxfp8"}
    assert methods == {row.method.split()[-1] for row in CHECKPOINT_FORMATS if "GGUF" not in row.method} - others
    assert {kind for layers in IN_GGUF.values() for layer in layers for kind in layer} | {"BF16"} == set(EXPERT_TYPES)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def running(request: pytest.FixtureRequest, bf16: Path) -> Iterator[Engine]:
    with engine(bf16, "--dtype", request.param) as started:
        yield started


def served(running: Engine, lora_id: str | None = None) -> tuple[dict[str, Row], dict[str, np.ndarray]]:
    """By request: prompt and answer, and the served log-probabilities of all tokens but the first."""
    running.clear()
    prompts = {f"{lora_id} {length}": prompt(length, length) for length in LENGTHS}
    requests = (running.request(rid, ids, logprob_start_len=0, lora_id=lora_id) for rid, ids in prompts.items())
    running.run(*requests)
    rows = {rid: Row(lora_id, tokens + running.tokens[rid]) for rid, tokens in prompts.items()}
    return rows, {rid: np.array(running.prompt_logprobs[rid] + running.logprobs[rid], np.float32) for rid in prompts}


EVERY = [*LOADED, *IN_GGUF]
# How each is read: ../../experts/quantized.
FEW = ["fp8", "int4_g32"]


@pytest.mark.parametrize("name", choose(few=FEW, usual=EVERY, every=EVERY))
def test_served_logprobs_are_those_of_the_weights_and_of_training(
    name: str, running: Engine, stored: Callable[[str], Stored]
) -> None:
    checkpoint = stored(name)
    running.load_experts(checkpoint.quantized)
    assert expert_store().format == checkpoint.held and native_step.state() == STEP_RUNNING
    rows, found = served(running)
    model = load_hugging_face(checkpoint.plain)
    differences = []
    for rid, row in rows.items():
        expected = logprobs_of(model, row.tokens)
        assert np.std(expected) > 0.1
        differences.append(np.abs(found[rid] - expected))
    largest, mean = max(map(np.max, differences)), np.mean(np.concatenate(differences))
    print(f"{checkpoint.held}: largest difference of a logprob {largest:.1e}, mean {mean:.1e}")
    if running.scheduler.tp_worker.model_runner.dtype.itemsize == 4:
        assert largest <= FLOAT32_TOLERANCE
    else:
        assert mean <= BFLOAT16_TOLERANCE

    adapter = lora.random_adapter(running.config, rank=4, alpha=6.0, seed=2)
    with installed(running, one=adapter):
        adapted, with_adapter = served(running, "one")
    assert [row.tokens for row in adapted.values()] != [row.tokens for row in rows.values()]
    trained = Trainer(running, {"one": adapter}).logprobs({**rows, **adapted}, max_tokens=64)
    for rid, logprobs in {**found, **with_adapter}.items():
        assert np.array_equal(trained[rid].numpy(), logprobs), rid
