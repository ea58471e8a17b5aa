"""Training and serving on a GPU: log-probabilities of what a server itself sampled, for every family, in every variant.

The bodies are those of a CPU (tests/system/training/test_parity_of_training_and_serving.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference.place import Place
from system.training.test_parity_of_training_and_serving import (  # noqa: F401
    PRESETS,
    Served,
    serving,
    test_a_training_step_reports_the_logprobs_of_sampling,
    test_chunks_and_cached_prefixes_have_training_s_logprobs,
    test_sampled_tokens_have_training_s_logprobs,
)

PLACES = ("deterministic", "no-graphs", "own-kernels", "hot", "streamed")


@pytest.fixture(scope="module", params=PRESETS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    with serving(place, request.param, "bfloat16", tmp_path_factory.mktemp("server")) as started:
        yield started
