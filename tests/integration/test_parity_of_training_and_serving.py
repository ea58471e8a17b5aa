"""Training and serving compute the same probabilities: k3 KL in bf16, on what the server itself sampled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings

LARGEST_K3 = 1e-3
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 48


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAPI]:
    place = tmp_path_factory.mktemp("server")
    make_model(request.param, place / "model", seed=4)
    options = ["--adapter-dir", str(place / "adapters"), "--dtype", "bfloat16"]
    with server(str(place / "model"), options, place / "server.log") as started:
        yield started


def sampled(api: ServerAPI, adapter: str | None) -> tuple[list[list[int]], np.ndarray]:
    """Prompt + answer of each request, and the log-probabilities with which the answers were sampled."""
    prompts = np.random.default_rng(7).integers(3, 700, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "lora_path": [adapter] * NUM_PROMPTS,
        "return_logprob": True,
    }
    answers = api.post("/generate", body)
    rows = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    logprobs = [[item[0] for item in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    return rows, np.array(logprobs, np.float64)


def k3(client: ResidentClient, rows: list[list[int]], served: np.ndarray, adapter_off: bool) -> tuple[float, float]:
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    result = client.forward("parity", batch, adapter_off=adapter_off)
    trained = np.stack([row[-NEW_TOKENS:] for row in result.logprobs]).astype(np.float64)
    difference = trained - served
    return float(np.mean(np.expm1(difference) - difference)), float(np.abs(difference).max())


def test_k3_kl_between_training_and_sampling(api: ServerAPI) -> None:
    with resident_client(api) as client:
        client.create_session("parity", LoraSettings(rank=8, alpha=16, seed=5))
        rows = np.random.default_rng(8).integers(3, 700, (4, 33)).tolist()
        client.forward_backward("parity", Batch.from_sequences([r[:-1] for r in rows], [r[1:] for r in rows]))
        client.optim_step("parity", 0.005)
        client.publish("parity", "tuned")
        for adapter in (None, "tuned"):
            value, largest = k3(client, *sampled(api, adapter), adapter_off=adapter is None)
            print(
                f"{client.status().family} {adapter or 'base'}: k3 KL {value:.2e}, largest |difference| {largest:.3f}"
            )
            assert 0 <= value <= LARGEST_K3
        client.close_session("parity")
