"""SGLang's servers on the emulated device: they serve, train, publish under streams, and find prefixes in every tier.

Dense layers, KV pool and LoRA pool are on the device, experts in the CPU's store, and some of them, or all in turn, on
the device. PyTorch's operators stand for SGLang's kernels. What is sampled has training's log-probabilities (bodies of
tests/system, as on a CPU); a stream's answer is one version's; what was cached on the device, the host or the disk,
also before a restart, answers as what is computed.

`LATE_SEEDS=20` runs a server for each of 20 seeds, `LATE_SERVERS="qwen3:hot:random-7 deepseek:off:late"` those that it
names: family, experts, schedule. `make test-device` runs the former.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from device.backend import NAME
from device.serving import CACHED_TOKENS, EXPERTS, FAMILIES, PROMPT, Case, Running, package, seeded, train
from reference import parity
from reference.parity import sampled
from reference.place import Place
from system import forked_server
from system.adapters.test_publish_under_streams import PROMPTS, KeepAsking, generate
from system.training.test_parity_of_training_and_serving import (  # noqa: F401
    MODELS,
    Served,
    test_a_training_step_reports_the_logprobs_of_sampling,
    test_chunks_and_cached_prefixes_have_training_s_logprobs,
    test_sampled_tokens_have_training_s_logprobs,
)

from kt_runtime.cli import server_process
from kt_runtime.wire.messages import LoraSettings

CASES = os.environ.get("LATE_SERVERS", "qwen3:hot:random-1 deepseek:streamed:late").split()
if "LATE_SEEDS" in os.environ:
    CASES = seeded(int(os.environ["LATE_SEEDS"]))
# In float32: in bf16 the orders of sums change what is chosen.
K3, LARGEST = 1e-11, 6e-5  # 1.4e-12 and 7.2e-6 measured, in the servers of docs/gpu.md
# Fewer than on a CPU: an operator here is a hundred times as slow as on a GPU.
SAMPLED_PROMPTS, SAMPLED_TOKENS = 6, 12
STREAMS, STREAMED_TOKENS = PROMPTS[:4], 8
BEGIN_SECONDS = 240.0


@pytest.fixture(scope="module", autouse=True)
def device_of_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every server of this module is a fork of a process that has the device."""
    with patch.dict(os.environ, package(tmp_path_factory.mktemp("package"))), pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_process, "_start", forked_server.start)
        patched.setattr(parity, "NUM_PROMPTS", SAMPLED_PROMPTS)
        patched.setattr(parity, "NEW_TOKENS", SAMPLED_TOKENS)
        forked_server.import_all()
        yield


@pytest.fixture(scope="module", params=CASES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device_of_servers: None
) -> Iterator[Running]:
    case = Case.parsed(request.param)
    place = Place(str(case), NAME, EXPERTS[case.experts], k3=K3, largest=LARGEST)
    started = Running(FAMILIES[case.family], place, tmp_path_factory.mktemp("server"))
    with patch.dict(os.environ, {"LATE_SCHEDULE": case.schedule}), started.started():
        yield started


@pytest.fixture
def served(running: Running) -> Served:
    return running.served


def test_experts_compute_where_the_server_was_told(running: Running) -> None:
    """Hot ones are found while it decodes, and then answer; streamed calls are those of prefills and of training."""
    sampled(running.api, None)
    status, name = running.client.status(), str(running.place)
    hot, streaming = status.gpu_experts, status.expert_streaming
    print(f"{name}: {hot} {streaming}")
    assert (hot is not None, streaming is not None) == (":hot:" in name, ":streamed:" in name)
    assert hot is None or (hot.moves > 0 and hot.hits > 0 and hot.misses > 0)
    assert streaming is None or (streaming.forward_tokens > 0 and streaming.backward_tokens > 0)


def test_each_stream_is_answered_by_one_version_while_another_is_trained_and_published(running: Running) -> None:
    """Both versions are seen, no stream fails, and the model's own weights stay what they were."""
    fingerprint = running.api.get("/kt/status?verify=true")["fingerprint"]
    running.client.create_session("streams", LoraSettings(rank=4, alpha=16, seed=1))
    train(running.client, "streams", seed=1)
    first = running.client.publish("streams", "moving")
    of_first = [generate(running.api, prompt, "moving", STREAMED_TOKENS)["output_ids"] for prompt in STREAMS]

    asked = KeepAsking(running.api, "moving", STREAMS, STREAMED_TOKENS)
    for stream in asked.streams[: len(STREAMS)]:
        assert stream.has_begun.wait(BEGIN_SECONDS), stream.error
    train(running.client, "streams", seed=2, sequences=8)
    second = running.client.publish("streams", "moving")
    streams = asked.finish()
    of_second = [generate(running.api, prompt, "moving", STREAMED_TOKENS)["output_ids"] for prompt in STREAMS]
    running.client.close_session("streams")

    assert first.version != second.version
    assert all(one != other for one, other in zip(of_first, of_second, strict=True))
    assert [stream.error for stream in streams if stream.error] == []
    versions = []
    for stream in streams:
        index = STREAMS.index(stream.prompt)
        assert stream.tokens in (of_first[index], of_second[index])
        versions.append(1 if stream.tokens == of_first[index] else 2)
    print(f"{running.place}: {versions.count(1)} streams of the first version, {versions.count(2)} of the second")
    assert set(versions) == {1, 2}
    assert running.api.post("/kt/adapters/moving/rollback", {"version": None})["version"] == first.version
    assert generate(running.api, STREAMS[0], "moving", STREAMED_TOKENS)["output_ids"] == of_first[0]
    assert running.api.get("/kt/status?verify=true")["fingerprint"] == fingerprint


@pytest.mark.parametrize("adapter", MODELS)
def test_a_prefix_from_each_tier_answers_as_a_computed_one(running: Running, adapter: str | None) -> None:
    running.served.flush_cache()
    cold = running.cold(adapter)
    computed = {"device": 0, "host": 0, "disk": 0, "computed": len(PROMPT)}
    assert cold.tiers == computed
    _check_answer(running, adapter, "device")
    running.cached.flush_device()
    _check_answer(running, adapter, "host")
    running.cached.flush_memory()
    _check_answer(running, adapter, "disk")
    trained = running.served.trained([[*PROMPT, *cold.tokens]], adapter)[0]
    running.place.check_same(cold.logprobs, trained[-len(cold.logprobs) :])


def test_after_a_restart_prefixes_are_on_the_disk_and_the_adapter_is_the_same(running: Running) -> None:
    """The last test of a server: sessions end with it."""
    for adapter in MODELS:
        running.cold(adapter)
    running.cached.flush_memory()
    running.restart()
    for adapter in MODELS:
        _check_answer(running, adapter, "disk")


def _check_answer(running: Running, adapter: str | None, tier: str) -> None:
    """The answer to `PROMPT` has its prefix from `tier`, and is the one that was computed."""
    cold, found = running.cold(adapter), running.ask(adapter)
    expected = {"device": 0, "host": 0, "disk": 0, "computed": len(PROMPT) - CACHED_TOKENS}
    assert found.tiers == {**expected, tier: CACHED_TOKENS}
    assert found.tokens == cold.tokens
    running.place.check_same(found.logprobs, cold.logprobs)
