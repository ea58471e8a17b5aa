"""SGLang's servers on the emulated device: what they sample has training's log-probabilities; versions are published.

The bodies are those of a CPU (tests/system). Dense layers, KV pool and LoRA pool are on the device, experts in the
CPU's store. PyTorch's operators stand for SGLang's kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from device.backend import NAME
from device.serving import environment
from reference.place import Place
from system.test_parity_of_training_and_serving import (  # noqa: F401
    Served,
    serving,
    test_a_training_step_reports_the_logprobs_of_sampling,
    test_chunks_and_cached_prefixes_have_training_s_logprobs,
    test_sampled_tokens_have_training_s_logprobs,
)

# (preset, schedule, options of `kt-runtime serve`). In float32: in bf16 the orders of sums change what is chosen.
SERVERS = {
    "qwen3-late": ("tiny-qwen3-moe", "late", ("--stream-experts", "off")),
    "deepseek-late": ("tiny-deepseek-v3", "late", ("--stream-experts", "off")),
}
K3, LARGEST = 1e-11, 7e-5  # 1.2e-12 and 6.7e-6 measured


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    preset, schedule, options = SERVERS[request.param]
    directory = tmp_path_factory.mktemp("server")
    place = Place(request.param, NAME, options, k3=K3, largest=LARGEST)
    variables = patch.dict(os.environ, environment(directory / "package", schedule))
    with variables, serving(place, preset, "float32", directory) as started:
        yield started
