"""Servers of quantized checkpoints: what they answer, that they train in place, and that both agree.

In float32 the experts multiply exactly in every format, so that answers equal those of Hugging Face with dequantized
weights. In bf16 the experts of integer formats quantize their activations to int8, in training as in serving.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.checkpoints.quantized_checkpoint import SHARDS, quantize_checkpoint
from reference.parity import agreement, sampled
from reference.place import Place
from reference.server import greedy
from safetensors.torch import load_file, save_file

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.main import main
from kt_runtime.cli.server_process import free_port, server
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

NEW_TOKENS = 12
FLOAT32_TOLERANCE = 4e-5  # of a log-probability; sums in another order: 4.1e-6 was measured
STEPS = 12


@dataclass(frozen=True)
class Case:
    """`scheme`: of the checkpoint; `held`: the store's format of the experts. `options`: of `kt-runtime serve`.

    `model_type`: None, the preset's. `largest_mean`: of the absolute difference from Hugging Face's log-probabilities
    in float32; what bf16 itself costs a model this small is half of it.
    """

    preset: str
    scheme: str | None
    held: str
    experts_only: bool = False
    options: tuple[str, ...] = ()
    model_type: str | None = None
    largest_mean: float = 0.0

    def __str__(self) -> str:
        return f"{self.preset}-{self.scheme or self.held}"


@dataclass(frozen=True)
class Served:
    """`plain`: a checkpoint of the same weights, dequantized to float32."""

    case: Case
    api: ServerAPI
    plain: Path
    place: Place


EXACT = (
    Case("tiny-deepseek-v3", "fp8", "fp8_e4m3_g128"),
    Case("tiny-qwen3-moe", "awq_g32", "int4_g32_zp"),
    Case("tiny-qwen3-moe", "nvfp4_modelopt", "nvfp4_g16"),
)
ROUNDED = (
    Case("tiny-deepseek-v3", "fp8", "fp8_e4m3_g128", largest_mean=0.08),
    Case("tiny-deepseek-v3", "int4_g32", "int4_g32", experts_only=True, model_type="kimi_k2", largest_mean=0.08),
    Case("tiny-qwen3-moe", None, "int8", options=("--expert-format", "int8"), largest_mean=0.08),
)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def started(case: Case, dtype: str, directory: Path, place: Place) -> Iterator[Served]:
    quantized = plain = make_model(case.preset, directory / "model", seed=6)
    if case.scheme is not None:
        quantized, plain = quantize_checkpoint(
            directory / "model", directory, case.scheme, experts_only=case.experts_only
        )
    if case.scheme == "nvfp4_modelopt":  # ModelOpt writes this file too, which SGLang must not read
        settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        (quantized / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    if case.model_type is not None:
        edit_config(quantized, model_type=case.model_type)
    options = ["--adapter-dir", str(directory / "adapters"), "--dtype", dtype, *case.options]
    with server(str(quantized), place.arguments(options), directory / "server.log") as api:
        yield Served(case, api, plain, place)


@pytest.fixture(scope="module", params=EXACT, ids=str)
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    yield from started(request.param, "float32", tmp_path_factory.mktemp("exact"), place)


@pytest.fixture(scope="module", params=ROUNDED, ids=str)
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    yield from started(request.param, "bfloat16", tmp_path_factory.mktemp("rounded"), place)


def test_in_float32_answers_are_those_of_the_dequantized_weights(exact: Served) -> None:
    tolerance = FLOAT32_TOLERANCE * exact.place.float32_factor
    largest = greedy.largest_difference(exact.api, exact.plain, NEW_TOKENS, tolerance)
    print(f"{exact.case}: largest difference of a logprob {largest:.1e}")


def test_status_names_the_format_of_the_experts_and_copies_nothing(exact: Served) -> None:
    status = exact.api.get("/kt/status")
    assert status["expert_format"] == exact.case.held
    assert status["weights_copied_bytes"] == 0


def test_training_on_it_lowers_a_loss_publishes_and_agrees_with_serving(rounded: Served) -> None:
    model = greedy.load_hugging_face(rounded.plain)
    with resident_client(rounded.api) as client:
        status = client.status(verify_weights=True)
        assert status.expert_format == rounded.case.held
        client.create_session("parity", LoraSettings(rank=8, alpha=16, seed=5))
        rows = np.random.default_rng(8).integers(3, 700, (4, 33)).tolist()
        batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
        losses = []
        for _ in range(STEPS):
            losses.append(client.forward_backward("parity", batch).loss)
            client.optim_step("parity", 0.005)
        assert losses[-1] < 0.8 * losses[0]
        client.publish("parity", "tuned")
        answers = {}
        for adapter in (None, "tuned"):
            tokens, served = sampled(rounded.api, adapter)
            found = agreement(client, "parity", (tokens, served), "policy" if adapter else "base")
            print(f"{rounded.place} {rounded.case} {adapter or 'base'}: {found}")
            rounded.place.check(found)
            answers[adapter] = (tokens, served)
        assert answers[None][0] != answers["tuned"][0]
        tokens, served = answers[None]
        correct = np.array([greedy.logprobs_of(model, row)[-served.shape[1] :] for row in tokens])
        mean = float(np.abs(correct - served).mean())
        print(f"{rounded.case}: mean |difference| from the dequantized weights in float32 {mean:.4f}")
        assert mean <= rounded.case.largest_mean
        assert client.status(verify_weights=True).fingerprint == status.fingerprint
        client.close_session("parity")


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("bitsandbytes", (), "unknown quant_method 'bitsandbytes'; known: awq, compressed-tensors, fp8, gptq"),
        (None, ("--expert-format", "int5"), "unknown expert format 'int5'; did you mean 'int"),
        ("int4_g32", ("--expert-format", "int8"), "quantized to integers already"),
    ],
)
def test_what_cannot_be_served_is_refused_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str | None, options: tuple[str, ...], said: str
) -> None:
    """Before any of SGLang's processes is started."""
    directory = make_model("tiny-qwen3-moe", tmp_path / "model", seed=6)
    if method == "int4_g32":
        directory, _ = quantize_checkpoint(directory, tmp_path, method)
    elif method is not None:
        edit_config(directory, quantization_config={"quant_method": method})
    assert main(["serve", "--model", str(directory), "--port", str(free_port()), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_scale_that_is_no_number_is_found_while_loading_and_ends_the_start_with_status_2(tmp_path: Path) -> None:
    """With the file, the tensor and its place; before anything is served."""
    directory = make_model("tiny-qwen3-moe", tmp_path / "model", seed=6)
    directory, _ = quantize_checkpoint(directory, tmp_path, "fp8", experts_only=True)
    file, name = directory / SHARDS[1], "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    tensors = load_file(file)
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with (
        pytest.raises(RuntimeFault, match="ended with status 2") as refused,
        server(str(directory), [], tmp_path / "log"),
    ):
        pass
    assert f"kt-runtime: {file}: tensor '{name}' holds scale nan (allowed: above 0" in str(refused.value)
