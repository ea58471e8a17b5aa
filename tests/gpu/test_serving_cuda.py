"""The same server on a CUDA machine: SGLang's own platform and attention, experts on the CPU through pinned buffers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from reference.parity import GPU_K3, agreement, sampled

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAPI]:
    place = tmp_path_factory.mktemp("server")
    make_model(request.param, place / "model", seed=4)
    with server(str(place / "model"), ["--adapter-dir", str(place / "adapters")], place / "server.log") as started:
        yield started


def test_dense_weights_are_on_the_gpu_and_experts_in_the_store(api: ServerAPI) -> None:
    status = api.get("/kt/status")
    assert status["device"].startswith("cuda")
    assert status["weights_copied_bytes"] == 0 and status["expert_bytes"] > 0


def test_an_adapter_is_trained_published_and_served_with_the_probabilities_it_was_trained_with(api: ServerAPI) -> None:
    prompts = np.random.default_rng(7).integers(3, 700, (8, 24)).tolist()
    with resident_client(api) as client:
        client.create_session("gpu", LoraSettings(rank=8, alpha=16, seed=5))
        batch = Batch.from_sequences([row[:-1] for row in prompts], [row[1:] for row in prompts])
        losses = []
        for _ in range(5):
            losses.append(client.forward_backward("gpu", batch).loss)
            client.optim_step("gpu", 0.01)
        assert losses[-1] < losses[0]
        client.publish("gpu", "tuned")
        value = agreement(client, "gpu", sampled(api, "tuned"), "policy").k3
        print(f"k3 KL on CUDA: {value:.2e}")
        assert 0 <= value <= GPU_K3
        client.close_session("gpu")
