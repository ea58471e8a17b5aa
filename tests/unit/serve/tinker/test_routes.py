"""The API as a client sees it: futures, order, resends, failures, sessions, names and checkpoints."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import zstandard

from kt_runtime.errors import ConflictError, InvalidValueError, ServerUnreachableError
from kt_runtime.serve.http.route_table import TRAINING_BODY_BYTES, Access, rule_for
from kt_runtime.serve.tinker import service
from kt_runtime.serve.tinker.protocol.schema import ForwardBackwardRequest
from kt_runtime.serve.tinker.routes import decompressed, tinker_routes
from kt_runtime.wire import messages as m

ZSTD = {"content_type": "application/x-protobuf", "content_encoding": "zstd"}


def test_every_route_is_in_the_route_table() -> None:
    routes = [(method, route.path) for route in tinker_routes(Mock()).routes for method in route.methods]  # type: ignore
    assert len(routes) > 25
    for method, path in routes:
        rule = rule_for(method, path)
        assert rule is not None and rule.access in (Access.READ, Access.GUARDED), (method, path)
    assert rule_for("POST", "/api/v1/optim_step").access is Access.GUARDED  # type: ignore[union-attr]


def test_from_a_session_to_an_optimizer_step(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        model = await desk.model(session, rank=8, seed=5, train_attn=False)
        info = await desk.post("get_info", {"model_id": model})
        assert info["model_data"]["tokenizer_id"] == "/models/tiny" and info["lora_rank"] == 8
        forward = await desk.result(await desk.post("forward_backward", desk.training(model, 1)))
        assert forward["metrics"]["loss:sum"] == 3.5 and forward["metrics"]["counted:sum"] == 2
        assert forward["loss_fn_outputs"] == [{"logprobs": {"data": [0, -1, -2], "dtype": "float32", "shape": [3]}}]
        adam = {"learning_rate": 0.5, "beta1": 0.8, "beta2": 0.7, "eps": 1e-9, "weight_decay": 0.1, "grad_clip_norm": 2}
        step = await desk.result(await desk.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": adam}))
        assert step == {"metrics": {"grad_norm:mean": 0.5, "step:max": 1.0}}

    desk.run(scenario)
    (opened,) = desk.resident.received(m.CreateSession)
    assert opened.lora == m.LoraSettings(rank=8, alpha=32.0, targets=["experts"], seed=5)
    (step,) = desk.resident.received(m.OptimStep)
    assert (step.learning_rate, step.beta1, step.beta2, step.epsilon) == (0.5, 0.8, 0.7, 1e-9)
    assert (step.weight_decay, step.max_grad_norm) == (0.1, 2.0)


def test_calls_run_in_the_order_of_their_seq_id_and_a_resent_one_runs_once(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        model = await desk.model(await desk.session())
        third = await desk.post("optim_step", {"model_id": model, "seq_id": 3})
        second = await desk.post("forward_backward", desk.training(model, 2))
        assert await desk.post("optim_step", {"model_id": model, "seq_id": 3}) == third
        await asyncio.sleep(0.05)
        assert not desk.resident.received(m.OptimStep)
        first = await desk.post("forward_backward", desk.training(model, 1))
        for opened in (third, second, first, third):
            assert "error" not in await desk.result(opened)
        assert await desk.post("forward_backward", desk.training(model, 1)) == first

    desk.run(scenario)
    assert [type(request) for request in desk.resident.requests[1:4]] == [
        m.ForwardBackward,
        m.ForwardBackward,
        m.OptimStep,
    ]
    assert len(desk.resident.received(m.OptimStep)) == 1


@pytest.mark.parametrize("form", ["protobuf", "zstd", "bomb", "json", "nonsense"])
def test_a_call_that_is_too_large_or_unreadable_fails_in_its_place_at_once(desk: Any, form: str) -> None:
    """The later calls of the run would wait six minutes for it."""
    large = b"\0" * (TRAINING_BODY_BYTES + 1)

    async def scenario(desk: Any) -> None:
        model = await desk.model(await desk.session())
        after = await desk.post("optim_step", {"model_id": model, "seq_id": 2})
        head, identity = ForwardBackwardRequest(model_id=model, seq_id=1).SerializeToString(), model.encode()
        headers: dict[str, Any] = {}
        match form:
            case "protobuf":
                body, headers = head + large, {"content_type": "application/x-protobuf"}
            case "zstd":
                noise = np.random.default_rng(0).bytes(TRAINING_BODY_BYTES)
                body, headers = zstandard.compress(head + noise), ZSTD
            case "bomb":
                body, headers = zstandard.compress(head + large), ZSTD
            case "json":
                body = b'{"forward_backward_input": "' + large + b'", "seq_id": 1, "model_id": "%s"}' % identity
            case _:
                body = b'{"forward_backward_input": 5, "seq_id": 1, "model_id": "%s"}' % identity
        opened = await desk.post("forward_backward", body, **headers)
        failure = await desk.result(opened)
        assert failure["category"] == "user"
        assert ("Expected" if form == "nonsense" else str(TRAINING_BODY_BYTES)) in failure["error"], failure
        assert "error" not in await desk.result(after)
        assert await desk.post("forward_backward", body, **headers) == opened

    desk.run(scenario)


def test_a_large_body_that_does_not_say_its_place_is_answered_413(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        large = b"\0" * (TRAINING_BODY_BYTES + 1)
        answer = await desk.post("forward_backward", large, 413, content_type="application/x-protobuf")
        assert "send fewer or shorter data" in answer["detail"]
        head = ForwardBackwardRequest(model_id="s:train:0", seq_id=1).SerializeToString()
        await desk.post("forward_backward", head + large, 404, content_type="application/x-protobuf")

    desk.run(scenario)


def test_a_wrong_call_fails_in_its_place_and_the_run_goes_on(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        model = await desk.model(await desk.session())
        wrong = [
            desk.training(model, 1, loss="huh"),
            desk.training(model, 2, weights=("float32", [1.0])),
            desk.training(model, 3, target_tokens=("int64", [1, 2, -3])),
            desk.training(model, 4, loss="ppo", logprobs=("float32", [0.0] * 3), advantages=("float32", [1e39, 0, 0])),
        ]
        for body in wrong:
            failed = await desk.result(await desk.post("forward_backward", body))
            assert failed["category"] == "user" and failed["error"]
        body = {"model_id": model, "seq_id": 5, "adam_params": {"learning_rate": 1, "momentum": 2}}
        assert "momentum" in (await desk.result(await desk.post("optim_step", body)))["error"]
        body = {"model_id": model, "seq_id": 6, "optimizer_params": {"type": "dimuon"}}
        assert "adamw only" in (await desk.result(await desk.post("optim_step", body)))["error"]
        body = {"model_id": model, "seq_id": 7, "path": "x"}
        assert "adapter export" in (await desk.result(await desk.post("save_weights_external", body)))["error"]
        assert "error" not in await desk.result(await desk.post("optim_step", {"model_id": model, "seq_id": 8}))

    desk.run(scenario)
    assert not desk.resident.received(m.ForwardBackward) and len(desk.resident.received(m.OptimStep)) == 1


def test_an_error_of_the_resident_has_its_category(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        model = await desk.model(await desk.session())
        desk.resident.errors = {m.OptimStep: ServerUnreachableError("gone")}
        failed = await desk.result(await desk.post("optim_step", {"model_id": model, "seq_id": 1}))
        assert failed == {"error": "gone", "category": "server"}
        desk.resident.errors = {m.ForwardBackward: InvalidValueError("too long")}
        failed = await desk.result(await desk.post("forward_backward", desk.training(model, 2)))
        assert failed == {"error": "too long", "category": "user"}

    desk.run(scenario)


def test_protobuf_is_taken_plain_and_compressed_and_answered_where_the_client_accepts_it(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        model = await desk.model(await desk.session())
        for seq_id, compress in ((1, False), (2, True)):
            request = ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy", forward_only=True)
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
            target = datum.loss_fn_inputs["target_tokens"]
            target.dense, target.dtype = np.array([2, 3], "<i8").tobytes(), 2
            body, headers = request.SerializeToString(), {"content_type": "application/x-protobuf"}
            if compress:
                body, headers["content_encoding"] = zstandard.compress(body), "zstd"
            opened = await desk.post("forward_backward", body, **headers)
            accept = {"accept": "application/x-protobuf"}
            answer = await desk.http.post("retrieve_future", json=opened, headers=accept)
            assert answer.headers["content-type"] == "application/x-protobuf"
            assert "error" not in await desk.result(opened)
        assert (
            "no protobuf"
            in (await desk.post("forward_backward", b"\xff\xff\xff", 400, content_type="application/x-protobuf"))[
                "detail"
            ]
        )
        assert "no zstd" in (await desk.post("forward_backward", b"abc", 400, content_encoding="zstd"))["detail"]

    desk.run(scenario)
    assert len(desk.resident.received(m.Forward)) == 2


def test_a_compressed_body_may_not_grow_beyond_the_limit() -> None:
    bomb = zstandard.compress(b"\0" * (1 << 20))
    assert len(bomb) < 1000 and len(decompressed(bomb, 1 << 20)) == 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValueError, match="more than 1000 bytes"):
            decompressed(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model": "other"}, "unknown base model 'other'"),
        ({"lora_config": None}, "lora_config is missing"),
        ({"optimizer_config": {"type": "dimuon"}}, "adamw only"),
        ({"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False}}, "nothing to train"),
        ({"user_metadata": {"lora_alpha": "big"}}, "lora_alpha is 'big'"),
    ],
)
def test_a_model_that_can_not_be_made_is_a_failed_future(desk: Any, change: dict[str, Any], said: str) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}, **change}
        failed = await desk.result(await desk.post("create_model", body))
        assert said in failed["error"] and failed["category"] == "user"
        await desk.post("get_info", {"model_id": f"{session}:train:0"}, 404)

    desk.run(scenario)


def test_a_refusal_of_the_resident_ends_the_model_and_the_calls_behind_it(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        desk.resident.gate = asyncio.Event()
        desk.resident.errors = {m.CreateSession: ConflictError("64 sessions are open")}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        opened = await desk.post("create_model", body)
        assert await desk.post("create_model", body) == opened
        early = await desk.post("optim_step", {"model_id": f"{session}:train:0", "seq_id": 1})
        desk.resident.gate.set()
        for future in (opened, early):
            assert (await desk.result(future))["error"] == "64 sessions are open"

    desk.run(scenario)


def test_a_lost_clients_session_ends_and_its_checkpoints_stay(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 0.01)  # so often are clients looked after
    now_s = [100.0]

    async def scenario(desk: Any) -> None:
        session = await desk.session()
        model = await desk.model(session)
        saved = await desk.result(await desk.post("save_weights", {"model_id": model, "path": "one", "seq_id": 1}))
        assert saved["path"] == f"tinker://{model}/weights/one"
        waiting = await desk.post("optim_step", {"model_id": model, "seq_id": 3})
        now_s[0] += 61.0
        while desk.service.sessions.is_open(session):
            await asyncio.sleep(0.01)
        await desk.post("session_heartbeat", {"session_id": session}, 410)
        await desk.post("optim_step", {"model_id": model, "seq_id": 4}, 404)
        assert "ended" in (await desk.result(waiting))["error"]
        listed = await desk.get(f"training_runs/{model}/checkpoints")
        assert [one["checkpoint_id"] for one in listed["checkpoints"]] == ["weights/one"]
        assert len(desk.resident.received(m.CloseSession)) == 1
        again = await desk.session()
        body = {"session_id": again, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        assert (await desk.result(await desk.post("load_weights", body)))["model_id"] == f"{again}:train:0"
        assert desk.resident.received(m.Load)[0].path.endswith("/weights/one")

    desk.run(scenario, now=lambda: now_s[0])


def test_finishing_a_session_frees_it_at_once(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        model = await desk.model(session)
        await desk.http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
        await desk.post("get_info", {"model_id": model}, 404)
        while not desk.resident.received(m.CloseSession):
            await asyncio.sleep(0.01)

    desk.run(scenario)


def test_a_session_that_ends_while_its_model_is_opened_is_closed_in_the_resident_once_it_is_open(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        desk.resident.gate = asyncio.Event()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        opened = await desk.post("create_model", body)
        while not desk.resident.requests:
            await asyncio.sleep(0.01)
        await desk.http.post(f"sessions/{session}/finish")
        assert "ended" in (await desk.result(opened))["error"]
        assert not desk.resident.received(m.CloseSession)
        desk.resident.gate.set()
        while not desk.resident.received(m.CloseSession):
            await asyncio.sleep(0.01)

    desk.run(scenario)


def test_unloading_a_model_ends_the_call_that_runs_and_those_that_wait(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        model = await desk.model(await desk.session())
        desk.resident.gate = asyncio.Event()
        calls = [await desk.post("optim_step", {"model_id": model, "seq_id": seq_id}) for seq_id in (1, 2, 4)]
        while not desk.resident.received(m.OptimStep):
            await asyncio.sleep(0.01)
        unloaded = await desk.post("unload_model", {"model_id": model})
        for opened in calls:
            assert "ended" in (await desk.result(opened))["error"]
        assert (await desk.result(unloaded))["type"] == "unload_model"
        await desk.post("optim_step", {"model_id": model, "seq_id": 3}, 404)

    desk.run(scenario)


def test_a_saved_name_becomes_the_adapters_name_unless_another_has_it(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        desk.adapters.served["taken"] = "theirs"
        session = await desk.session()
        model = await desk.model(session)
        paths = []
        for seq_id, name in enumerate(("free", "taken", "tiny"), 1):
            body = {"model_id": model, "path": name, "seq_id": seq_id}
            paths.append((await desk.result(await desk.post("save_weights_for_sampler", body)))["path"])
        assert paths[0] == f"tinker://{model}/sampler_weights/free"
        wrong = {"model_id": model, "path": "../up", "seq_id": 4}
        assert "checkpoint name" in (await desk.result(await desk.post("save_weights_for_sampler", wrong)))["error"]
        listed = (await desk.get(f"training_runs/{model}/checkpoints"))["checkpoints"]
        adapters = [one["user_metadata"]["adapter"] for one in listed]
        mine = model.replace(":", ".")
        assert adapters == [f"tiny-{mine}", f"taken-{mine}", "free"]
        await desk.http.delete(f"training_runs/{model}/checkpoints/sampler_weights/free")
        assert desk.adapters.unloaded == ["free"]

    desk.run(scenario)
    assert [request.name.split("-")[0] for request in desk.resident.received(m.Publish)] == ["free", "taken", "tiny"]


def test_a_run_that_saves_every_step_has_its_newest_served_and_the_others_loaded_again(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_runtime.serve.tinker.service.SERVED_OF_RUN", 2)

    async def scenario(desk: Any) -> None:
        session = await desk.session()
        model = await desk.model(session)
        for seq_id in (1, 2, 3):
            body = {"model_id": model, "path": f"{seq_id:06d}", "seq_id": seq_id}
            await desk.result(await desk.post("save_weights_for_sampler", body))
        assert desk.adapters.unloaded == ["000001"] and not desk.adapters.served
        body = {"session_id": session, "sampling_session_seq_id": 0}
        body["model_path"] = f"tinker://{model}/sampler_weights/000001"
        await desk.post("create_sampling_session", body)
        assert desk.adapters.loaded == [("000001", str(desk.place / "000001" / f"{1:064x}"))]

    desk.run(scenario)


def test_an_unnamed_sampler_keeps_its_version_and_is_released_with_its_session(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        model = await desk.model(session)
        name = model.replace(":", ".")
        for number in (1, 2):
            desk.engine.names[name] = f"{number:064x}"
            body = {"model_id": model, "sampling_session_seq_id": number, "seq_id": number}
            saved = await desk.result(await desk.post("save_weights_for_sampler", body))
            assert saved["sampling_session_id"] == f"{session}:sample:{number}"
        versions = []
        for number in (1, 2):
            opened = await desk.post("asample", sample_of(f"{session}:sample:{number}"))
            assert len(opened["sample_sequence_ids"]) == 1
            versions.append((await desk.result(opened))["adapter_version"])
        assert versions == [f"{number:064x}" for number in (1, 2)]
        await desk.http.post(f"sessions/{session}/finish")
        while desk.engine.pinned:
            await asyncio.sleep(0.01)
        await desk.post("asample", sample_of(f"{session}:sample:1"), 404)
        assert desk.adapters.unloaded == [name]

    desk.run(scenario)


def sample_of(sampler: str, **fields: Any) -> dict[str, Any]:
    chunk = {"tokens": [1, 2, 3], "type": "encoded_text"}
    params = {"max_tokens": 2}
    return {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [chunk]},
        "sampling_params": params,
        "type": "sample",
        **fields,
    }


def test_the_base_an_adapter_by_name_and_a_path_can_be_sampled(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        desk.adapters.served["helper"] = desk.engine.names["helper"] = "v1"
        session = await desk.session()
        asked: list[dict[str, Any]] = [
            {"base_model": "tiny"},
            {"base_model": "helper"},
            {"model_path": "tinker://helper"},
        ]
        for number, source in enumerate(asked):
            source |= {"session_id": session, "sampling_session_seq_id": number}
            sampler = (await desk.post("create_sampling_session", source))["sampling_session_id"]
            assert (await desk.get(f"samplers/{sampler}"))["sampler_id"] == sampler
            assert "error" not in await desk.result(await desk.post("asample", sample_of(sampler)))
        assert [one["lora_path"] is None for one in desk.engine.requests] == [True, False, False]
        body: dict[str, Any] = {"session_id": session, "sampling_session_seq_id": 9}
        await desk.post("create_sampling_session", {**body, "base_model": "nobody"}, 404)
        await desk.post("create_sampling_session", {**body, "model_path": "tinker://nobody"}, 404)
        await desk.post("create_sampling_session", {**body, "model_path": "tinker://s1:train:0/weights/no"}, 404)
        await desk.post("create_sampling_session", {**body, "model_path": "tinker://a/../b"}, 400)
        await desk.post("create_sampling_session", body, 400)

    desk.run(scenario)


def test_a_resent_sample_runs_once(desk: Any) -> None:
    async def scenario(desk: Any) -> None:
        session = await desk.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await desk.post("create_sampling_session", body))["sampling_session_id"]
        first = await desk.post("asample", sample_of(sampler))
        assert await desk.post("asample", sample_of(sampler)) == first
        await desk.result(first)
        for wrong in ({"num_samples": 0}, {"num_samples": 10**6}, {"huh": 1}, {"sampling_params": {"top_p": 2}}):
            assert (await desk.post("asample", sample_of(sampler, **wrong), 400))["detail"]

    desk.run(scenario)
    assert len(desk.engine.requests) == 1


def test_an_unknown_future_is_gone_and_a_slow_one_is_asked_for_again(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_runtime.serve.tinker.routes.POLL_SECONDS", 0.05)

    async def scenario(desk: Any) -> None:
        await desk.post("retrieve_future", {"request_id": "x"}, 410)
        model = await desk.model(await desk.session())
        desk.resident.gate = asyncio.Event()
        opened = await desk.post("optim_step", {"model_id": model, "seq_id": 1})
        answer = await desk.result(opened)
        assert answer["type"] == "try_again" and answer["queue_state"] == "active"
        desk.resident.gate.set()
        assert "metrics" in await desk.result(opened)

    desk.run(scenario)


@pytest.mark.parametrize("path", ["create_session", "create_model", "optim_step", "asample", "load_weights"])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"session_id": 1}', b"\xff", b'{"a":' * 1000])
def test_a_broken_body_is_answered_with_a_reason(desk: Any, path: str, body: bytes) -> None:
    async def scenario(desk: Any) -> None:
        answer: httpx.Response = await desk.http.post(path, content=body)
        assert answer.status_code == 400 or (path == "create_session" and body == b'{"session_id": 1}')
        assert answer.content

    desk.run(scenario)
