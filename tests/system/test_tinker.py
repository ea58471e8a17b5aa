"""Tinker's own SDK, unmodified, against a real server: training, resuming, sampling, and clients that vanish."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import zstandard
from system.conftest import Served

from kt_runtime.serve.tinker.protocol.schema import ForwardBackwardOutput, ForwardBackwardRequest

os.environ["TINKER_TELEMETRY"] = "0"
tinker = pytest.importorskip("tinker", reason="pip install kt-runtime[test]")

pytestmark = [
    pytest.mark.preset("tiny-qwen3-moe"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

BASE = "model"
"""The server names the model after its directory."""


@pytest.fixture
def client(float32_server: Served) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=float32_server.api.url, api_key="tml-any") as opened:
        yield opened


@pytest.fixture
def rest(client: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return client.create_rest_client()


def drawn(seed: int, length: int = 24) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, size=length).tolist()


def datum(tokens: list[int], **inputs: list[float]) -> Any:
    weights = {} if inputs else {"weights": [1.0] * (len(tokens) - 1)}
    arrays = {name: np.array(values, np.float32) for name, values in {**weights, **inputs}.items()}
    arrays["target_tokens"] = np.array(tokens[1:], np.int64)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def trained(model: Any, data: list[Any], steps: int = 3) -> list[float]:
    """The loss before each step; calls are sent ahead, as the SDK's documentation advises."""
    losses = []
    for _ in range(steps):
        forward = model.forward_backward(data, "cross_entropy")
        step = model.optim_step(tinker.AdamParams(learning_rate=5e-3))
        losses.append(forward.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm:mean"] > 0
    return losses


def rollouts(sampler: Any, prompt: list[int], **settings: Any) -> list[Any]:
    """Four answers as data of a policy loss, as tinker-cookbook assembles them."""
    params = tinker.SamplingParams(max_tokens=16, **settings)
    result = sampler.sample(prompt=tinker.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params).result()
    before, data = [0.0] * (len(prompt) - 1), []
    for index, sequence in enumerate(result.sequences):
        advantages = before + [index - 1.5] * len(sequence.tokens)
        logprobs = before + list(sequence.logprobs)
        data.append(datum(prompt + list(sequence.tokens), logprobs=logprobs, advantages=advantages))
    return data


def test_from_scratch_to_a_name_in_openais_api(client: Any, rest: Any, float32_server: Served) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
    assert len(model.get_tokenizer()) > 0
    losses = trained(model, [datum(drawn(seed)) for seed in range(4)], steps=4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2
    path = model.save_weights_for_sampler("saved-by-tinker").result().path
    prompt = drawn(0)[:12]
    sampler = client.create_sampling_client(model_path=path).result()
    greedy = tinker.SamplingParams(max_tokens=8, temperature=0)
    answer = sampler.sample(prompt=tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=greedy).result()
    params = {"temperature": 0, "max_new_tokens": 8}
    body = {"input_ids": prompt, "sampling_params": params, "lora_path": "saved-by-tinker"}
    served = float32_server.api.post("/generate", body)
    assert served["output_ids"] == answer.sequences[0].tokens
    chat = {"model": "saved-by-tinker", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert float32_server.api.post("/v1/chat/completions", chat)["model"] == "saved-by-tinker"
    named = client.create_sampling_client(base_model="saved-by-tinker").result()
    again = named.sample(prompt=tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=greedy).result()
    assert again.sequences[0].tokens == answer.sequences[0].tokens
    rest.delete_checkpoint(model.model_id, "sampler_weights/saved-by-tinker").result()
    assert "saved-by-tinker" not in [
        one["name"] for one in float32_server.api.get("/kt/adapters")["adapters"] if one["current"]
    ]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_on_policy_k3_is_zero_and_after_a_step_it_is_not(client: Any, loss: str) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=2).result()
    trained(model, [datum(drawn(1))], steps=2)
    prompt = drawn(9, 11)
    data = rollouts(model.save_weights_and_get_sampling_client(), prompt)
    answered = sum(one.model_input.length - (len(prompt) - 1) for one in data)  # one may draw the end of text
    config = {"beta": 0.1} if loss == "dro" else None
    metrics = model.forward_backward(data, loss, config).result().metrics
    assert metrics["kl/k3:sum"] == metrics["kl/k1:sum"] == metrics["clip_fraction:mean"] == 0
    assert metrics["counted:sum"] == answered > 16
    model.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    assert model.forward(data, loss, config).result().metrics["kl/k3:mean"] > 0.12  # 1.2 to 2.0 measured


def test_a_client_asks_for_routing_replay_in_the_loss_s_settings(client: Any) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=2).result()
    trained(model, [datum(drawn(1))], steps=2)
    data = rollouts(model.save_weights_and_get_sampling_client(), drawn(9, 11))
    tokens = sum(len(one.model_input.to_ints()) for one in data)
    for asked, replayed in (("rollout", tokens), (1.0, tokens), ("compare", 0), ("off", None), (0.0, None)):
        metrics = model.forward(data, "ppo", {"routing_replay": asked}).result().metrics
        assert metrics.get("routes/replayed:sum") == replayed
    model.forward_backward(data, "importance_sampling", {"routing_replay": "rollout"}).result()
    model.optim_step(tinker.AdamParams(learning_rate=5e-2)).result()
    moved = model.forward_backward(data, "ppo", {"routing_replay": "rollout", "clip_low_threshold": 0.5}).result()
    assert moved.metrics["routes/missed:sum"] == 0 < moved.metrics["routes/moved:sum"]
    with pytest.raises(tinker.RequestFailedError, match=r"routing_replay: unknown value 'rolout'.*rollout"):
        model.forward(data, "ppo", {"routing_replay": "rolout"}).result()


def test_logprobs_at_another_temperature_are_the_models_own(client: Any) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=2).result()
    trained(model, [datum(drawn(1))], steps=2)
    data = rollouts(model.save_weights_and_get_sampling_client(), drawn(8, 9), temperature=0.6, top_p=0.9)
    assert model.forward(data, "importance_sampling").result().metrics["kl/k3:sum"] == 0


def test_a_sampler_keeps_its_weights_while_training_goes_on(client: Any) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=2).result()
    prompt = tinker.ModelInput.from_ints(drawn(5))
    samplers, before = [], []
    for _ in range(3):
        trained(model, [datum(drawn(1))], steps=1)
        samplers.append(model.save_weights_and_get_sampling_client())
        before.append(samplers[-1].compute_logprobs(prompt).result())
        trains = model.forward([datum(drawn(5))], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        assert before[-1][1:] == trains.to_torch().tolist()  # of this step, not of an earlier one
    assert before[0] != before[1] != before[2]
    assert [sampler.compute_logprobs(prompt).result() for sampler in samplers] == before


def test_a_preference_loss_of_the_clients_own_trains(client: Any) -> None:
    """DPO as tinker-cookbook computes it: reference log-probabilities, then a loss in the client's torch."""
    import torch

    model = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    pairs = [datum(drawn(seed)) for seed in (20, 21, 22, 23)]  # chosen, rejected, chosen, rejected
    reference = model.forward(pairs, "cross_entropy").result()
    start = [float(one["logprobs"].to_torch().sum()) for one in reference.loss_fn_outputs]

    def dpo(_: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        gains = [one.sum() - start[index] for index, one in enumerate(logprobs)]
        margins = torch.stack([0.1 * (gains[index] - gains[index + 1]) for index in (0, 2)])
        return -torch.nn.functional.logsigmoid(margins).mean(), {"margin": float(margins.mean().detach())}

    metrics = []
    for _ in range(4):
        metrics.append(model.forward_backward_custom(pairs, dpo).result().metrics)
        model.optim_step(tinker.AdamParams(learning_rate=2e-3)).result()
    assert metrics[0]["margin"] == 0 and metrics[0]["loss:sum"] == np.float32(np.log(2))
    assert metrics[-1]["margin"] > 1 and metrics[-1]["loss:sum"] < metrics[0]["loss:sum"]  # 9.0 measured


def test_a_run_resumes_exactly_from_its_state(client: Any, rest: Any) -> None:
    data = [datum(drawn(seed)) for seed in (30, 31)]
    model = client.create_lora_training_client(base_model=BASE, rank=8, seed=4, train_attn=False).result()
    trained(model, data)
    path = model.save_state("middle").result().path
    going_on = trained(model, data)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert trained(resumed, data) == going_on
    fresh = client.create_training_client_from_state(path).result()
    without_moments = trained(fresh, data)
    assert without_moments[0] == going_on[0] and without_moments[1:] != going_on[1:]
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        model.save_state("middle").result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed) == (8, False, True, False)
    runs = {run.training_run_id: run for run in rest.list_training_runs(limit=100).result().training_runs}
    assert runs[model.model_id].last_checkpoint.tinker_path == path
    rest.delete_checkpoint(model.model_id, "weights/middle").result()
    with pytest.raises(tinker.RequestFailedError, match="no such checkpoint"):
        client.create_training_client_from_state(path).result()


def test_three_clients_train_adapters_of_their_own_while_others_chat(float32_server: Served) -> None:
    """Each client's losses are those it has alone."""
    settings = [{"rank": 4, "seed": 5}, {"rank": 8, "seed": 6, "train_mlp": False}, {"rank": 16, "seed": 7}]

    def train(index: int) -> list[float]:
        with tinker.ServiceClient(base_url=float32_server.api.url, api_key="tml-any") as one:
            metadata = {"lora_alpha": str(8 * (index + 1))}
            model = one.create_lora_training_client(base_model=BASE, user_metadata=metadata, **settings[index]).result()
            losses = trained(model, [datum(drawn(40 + index, 48)) for _ in range(3)])
            rollouts(model.save_weights_and_get_sampling_client(), drawn(index, 9))
            return losses

    alone = [train(index) for index in range(3)]
    chat = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    expected = float32_server.api.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        together = [threads.submit(train, index) for index in range(3)]
        answers = []
        while not all(future.done() for future in together):
            answers.append(float32_server.api.post("/v1/chat/completions", chat))
        assert [future.result() for future in together] == alone
    assert answers and {one["choices"][0]["message"]["content"] for one in answers} == {expected}


def test_a_mistake_reaches_the_user_and_the_run_goes_on(client: Any) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=2).result()
    good = [datum(drawn(1))]
    before = model.forward(good, "cross_entropy").result().metrics["loss:sum"]
    mistakes = [
        ([datum(drawn(1, 3), weights=[1.0, float("nan")])], "cross_entropy", r"weights\[1\] is nan"),
        ([datum(drawn(1, 3), logprobs=[-1.0, -1], advantages=[1.0, float("nan")])], "ppo", r"advantages\[1\] is nan"),
        ([datum(drawn(1, 3), weights=[1.0])], "cross_entropy", "1 weights for 2 tokens"),
        ([datum([5] * 1_000_001)], "cross_entropy", "1000000 tokens; allowed are 1 to"),
        ([datum([5] * 2_200_001)], "cross_entropy", "this server takes 33554432"),  # its body is refused
        ([datum([3, 2_000_000])], "cross_entropy", "2000000"),
        (good, "stable_reinforce", "unknown loss"),
    ]
    for data, loss, said in mistakes:
        with pytest.raises(tinker.RequestFailedError, match=said) as failed:
            model.forward_backward(data, loss).result()
        assert failed.value.category.value == "user"
    with pytest.raises(tinker.RequestFailedError, match=r"learning_rate is -1\.0"):
        model.optim_step(tinker.AdamParams(learning_rate=-1)).result()
    with pytest.raises(tinker.RequestFailedError, match="up to rank"):
        client.create_lora_training_client(base_model=BASE, rank=100_000).result()
    for path in ("tinker://a/../../b", "tinker://s1:train:0/weights/..%2f..%2fetc"):
        with pytest.raises(tinker.BadRequestError, match="checkpoint path"):
            client.create_sampling_client(model_path=path).result()
    assert model.forward(good, "cross_entropy").result().metrics["loss:sum"] == before


VANISHING = """
import sys, tinker
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-any")
model = client.create_lora_training_client(base_model="model", rank=4, seed=2).result()
print(model.save_state("left").result().path, flush=True)
sampler = model.save_weights_and_get_sampling_client()
for number in range(100_000):
    params = tinker.SamplingParams(max_tokens=2000, stop=[])
    sampler.sample(prompt=tinker.ModelInput.from_ints([5, 6, 7]), num_samples=1, sampling_params=params)
    if number == 2:
        print("busy", flush=True)
    import time; time.sleep(1)
"""


def test_a_killed_clients_session_is_freed_and_its_checkpoint_stays(client: Any, float32_server: Served) -> None:
    """The shared server waits 25 s (conftest.py)."""
    command = [sys.executable, "-W", "ignore", "-c", VANISHING, float32_server.api.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    assert process.stdout.readline() == "busy\n"
    session = path.removeprefix("tinker://").split("/")[0].replace(":", ".")
    assert session in open_sessions(float32_server)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 90
    while session in open_sessions(float32_server) or float32_server.api.get("/kt/status")["requests_in_flight"]:
        assert time.monotonic() < deadline, "the session of a killed client is still there"
        time.sleep(0.5)
    assert session not in float32_server.api.get("/kt/status")["adapters"]
    model = client.create_training_client_from_state(path).result()
    assert model.forward([datum(drawn(1))], "cross_entropy").result().metrics["loss:sum"] > 0


def open_sessions(served: Served) -> list[str]:
    return [session["session"] for session in served.api.get("/kt/status")["sessions"]]


def test_bodies_of_an_older_sdk_and_compressed_ones_are_understood(float32_server: Served) -> None:
    """JSON bodies as SDK 0.7.0 sends them, through the server's checks of bodies."""
    with httpx.Client(base_url=f"{float32_server.api.url}/api/v1", headers={"X-API-Key": "tml-any"}) as http:

        def post(path: str, body: Any, **headers: str) -> Any:
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            return http.post(path, content=content, headers={"Content-Type": "application/json", **headers}, timeout=60)

        def result(opened: httpx.Response, **headers: str) -> httpx.Response:
            assert opened.status_code == 200, opened.text
            answer: httpx.Response = post("retrieve_future", {"request_id": opened.json()["request_id"]}, **headers)
            return answer

        session = post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.7.0"}).json()[
            "session_id"
        ]
        lora = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
        body: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        model = result(post("create_model", body)).json()["model_id"]
        tokens = drawn(1, 9)
        inputs = {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [8]},
            "weights": {"data": [1.0] * 8, "dtype": "float32", "shape": [8]},
        }
        chunks = [{"tokens": tokens[:-1], "type": "encoded_text"}]
        given = {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
        forward = result(post("forward", {"forward_input": given, "model_id": model, "seq_id": 1})).json()
        body = {"forward_backward_input": given, "model_id": model, "seq_id": 2}
        backward = result(post("forward_backward", body)).json()
        assert forward["loss_fn_outputs"] == backward["loss_fn_outputs"]

        request = ForwardBackwardRequest(model_id=model, seq_id=3, loss_fn="cross_entropy", forward_only=True)
        filled = request.data.add()
        filled.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
        target = filled.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.array(tokens[1:], "<i8").tobytes(), 2
        protobuf = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
        opened = post("forward_backward", zstandard.compress(request.SerializeToString()), **protobuf)
        answer = result(opened, Accept="application/x-protobuf")
        output = ForwardBackwardOutput.FromString(answer.content)
        assert output.metrics["loss:sum"] == forward["metrics"]["loss:sum"]

        bomb = post("forward_backward", zstandard.compress(b"\0" * (64 << 20)), **protobuf)
        assert bomb.status_code == 400 and "when decompressed" in bomb.json()["detail"]
        huge = post("forward_backward", b"\0" * (33 << 20), **{"Content-Type": "application/x-protobuf"})
        assert huge.status_code == 413 and huge.json()["detail"]
        http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
