"""Training and serving compute the same log-probabilities, bit by bit, whatever was cached or batched and however a
prompt was cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from reference.parity import GPU_K3, Agreement, cost_of_bf16, sampled, tiny_deepseek_v2, trained
from reference.place import Place
from reference.server import greedy

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import Activations, LoraSettings, Model

PRESETS = {
    "tiny-deepseek-v2": tiny_deepseek_v2,
    "tiny-deepseek-v3": lambda: load_preset("tiny-deepseek-v3"),
    "tiny-qwen3-moe": lambda: load_preset("tiny-qwen3-moe"),
}
CHUNK_TOKENS, PAGE_TOKENS, NEW_TOKENS = 64, 8, 12
MODELS: dict[str | None, Model] = {None: "base", "tuned": "policy"}


@dataclass(frozen=True)
class Served:
    """A server with the adapter "tuned", which the session "parity" has trained and published."""

    api: ServerAPI
    checkpoint: Path
    client: ResidentClient
    dtype: str
    place: Place

    def trained(self, rows: list[list[int]], adapter: str | None) -> list[np.ndarray]:
        return trained(self.client, "parity", rows, MODELS[adapter])

    def flush_cache(self) -> None:
        httpx.post(f"{self.api.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()


CASES = [(preset, dtype) for preset in PRESETS for dtype in ("bfloat16", "float32")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[Served]:
    preset, dtype = request.param
    with serving(place, preset, dtype, tmp_path_factory.mktemp("server")) as started:
        yield started


@contextmanager
def serving(place: Place, preset: str, dtype: str, directory: Path) -> Iterator[Served]:
    make_model(PRESETS[preset](), directory / "model", seed=4)
    options = ["--adapter-dir", str(directory / "adapters"), "--dtype", dtype]
    passed_on = ["--chunked-prefill-size", str(CHUNK_TOKENS), "--page-size", str(PAGE_TOKENS)]
    with (
        server(str(directory / "model"), place.arguments(options, passed_on), directory / "server.log") as api,
        resident_client(api) as client,
    ):
        client.create_session("parity", LoraSettings(rank=6, alpha=20, targets=["all"], seed=5))
        rows = np.random.default_rng(8).integers(3, 700, (4, 33)).tolist()
        client.forward_backward("parity", Batch.from_sequences([r[:-1] for r in rows], [r[1:] for r in rows]))
        client.optim_step("parity", 0.005)
        client.publish("parity", "tuned")
        yield Served(api, directory / "model", client, dtype, place)
        client.close_session("parity")


@pytest.mark.parametrize("adapter", MODELS)
def test_sampled_tokens_have_training_s_logprobs(served: Served, adapter: str | None) -> None:
    """Sixteen answers are decoded together; in training each is a row of its own."""
    rows, logprobs = sampled(served.api, adapter)
    status = served.client.status()
    assert status.device.startswith(served.place.device)
    assert (status.step == "running") == served.place.native_step
    found = Agreement.of(served.trained(rows, adapter), logprobs)
    print(f"{served.place} {status.family} {served.dtype} {adapter or 'base'}: {found}")
    served.place.check(found)


@pytest.mark.parametrize("activations", ["recompute", "retain"])
def test_a_training_step_reports_the_logprobs_of_sampling(served: Served, activations: Activations) -> None:
    """The step's gradient is dropped with the session; nothing is applied."""
    rows, logprobs = sampled(served.api, "tuned")
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    reported = served.client.forward_backward("parity", batch, activations=activations).logprobs
    found = Agreement.of(list(reported), logprobs)
    print(f"{served.place} {served.dtype} {activations}: {found}")
    served.place.check(found)


@pytest.mark.parametrize("adapter", MODELS)
def test_chunks_and_cached_prefixes_have_training_s_logprobs(served: Served, adapter: str | None) -> None:
    draw = np.random.default_rng(9)
    long = draw.integers(3, 700, 3 * CHUNK_TOKENS + 13).tolist()
    forked = [*long[:100], *draw.integers(3, 700, 30).tolist()]
    served.flush_cache()
    _check_logprobs(served, long, adapter, cached_from=0, logprob_start_len=0)
    _check_logprobs(served, forked, adapter, cached_from=96)
    _check_logprobs(served, long, adapter, cached_from=3 * CHUNK_TOKENS)


def _check_logprobs(
    served: Served, prompt: list[int], adapter: str | None, *, cached_from: int, **options: Any
) -> None:
    """A greedy answer's log-probabilities, and the prompt's where asked, are training's."""
    answer = greedy.generate(served.api, [prompt], NEW_TOKENS, lora_path=[adapter], **options)[0]
    meta = answer["meta_info"]
    assert meta["cached_tokens"] >= cached_from if cached_from else meta["cached_tokens"] == 0
    found = [item[0] for item in [*meta["input_token_logprobs"], *meta["output_token_logprobs"]] if item[0] is not None]
    wanted = served.trained([prompt + answer["output_ids"]], adapter)[0]
    assert len(found) in (NEW_TOKENS, len(wanted))
    served.place.check(Agreement.of([wanted], np.array([found])))


def test_training_with_other_roundings_would_be_noticed_on_a_gpu(served: Served) -> None:
    """There nothing is exact; the bound of its tests must be below what independent roundings to bf16 cost."""
    if served.dtype == "bfloat16":
        rows = np.random.default_rng(7).integers(3, 700, (16, 200)).tolist()  # sampled tokens would be others each time
        answers = greedy.generate(served.api, rows, 1, logprob_start_len=0)
        given = [[item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]
        cost = cost_of_bf16(greedy.load_hugging_face(served.checkpoint), rows, np.array(given))
        print(f"{served.place} bfloat16: k3 of other roundings {2 * cost:.1e}")
        assert 2 * cost > GPU_K3
