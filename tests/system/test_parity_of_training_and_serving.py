"""Training and serving compute the same probabilities: k3 KL in bf16, on what the server itself sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reference.greedy import load_hugging_face
from reference.parity import LARGEST_K3, UNMEASURED_K3, cost_of_bf16, k3, sampled

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerAPI, Path]]:
    """The server and its checkpoint."""
    place = tmp_path_factory.mktemp("server")
    make_model(request.param, place / "model", seed=4)
    options = ["--adapter-dir", str(place / "adapters"), "--dtype", "bfloat16"]
    with server(str(place / "model"), options, place / "server.log") as started:
        yield started, place / "model"


def test_k3_kl_between_training_and_sampling(served: tuple[ServerAPI, Path]) -> None:
    api, checkpoint = served
    cost = cost_of_bf16(load_hugging_face(checkpoint), *sampled(api, None))
    assert max(LARGEST_K3, UNMEASURED_K3) < 2 * cost, "training with other roundings than serving's would be accepted"
    with resident_client(api) as client:
        client.create_session("parity", LoraSettings(rank=8, alpha=16, seed=5))
        rows = np.random.default_rng(8).integers(3, 700, (4, 33)).tolist()
        client.forward_backward("parity", Batch.from_sequences([r[:-1] for r in rows], [r[1:] for r in rows]))
        client.optim_step("parity", 0.005)
        client.publish("parity", "tuned")
        for adapter in (None, "tuned"):
            value, largest = k3(client, "parity", *sampled(api, adapter), model="policy" if adapter else "base")
            print(
                f"{client.status().family} {adapter or 'base'}: k3 KL {value:.2e}, largest |difference| {largest:.1e}; "
                f"k3 KL of float32 and sampling {cost:.2e}"
            )
            assert 0 <= value <= LARGEST_K3
        client.close_session("parity")
