"""The resident with a real wire server and a real client, over a fake engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from reference.expert_problems import present
from reference.lora import huge_adapter, random_adapter, write_adapter
from reference.resident.engine import LORA, Engine, sequences, sessions_of, train

from kt_runtime.adapters import content_hash
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.main import main
from kt_runtime.errors import (
    AdapterError,
    ConflictError,
    InvalidValueError,
    NotFoundError,
    NumericsError,
    RuntimeFault,
    UnknownNameError,
)
from kt_runtime.resident.fingerprint import hash_weights
from kt_runtime.resident.scheduler import Slice, Work
from kt_runtime.wire import messages
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.client import ResidentClient
from kt_runtime.wire.messages import (
    ForwardBackward,
    GetStatus,
    LoraSettings,
    OptimStep,
    Publish,
)


@pytest.fixture
def start(make_host: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def begin(family: str = "deepseek_v3", root: str = "a") -> Engine:
        (tmp_path / root).mkdir(exist_ok=True)
        engines.append(Engine(make_host(family), tmp_path / root))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(start: Callable[..., Engine]) -> Engine:
    return start()


@pytest.fixture
def client(engine: Engine) -> Iterator[ResidentClient]:
    with engine.client() as opened:
        yield opened


def test_status_tells_what_is_shared_and_that_nothing_is_copied(engine: Engine, client: ResidentClient) -> None:
    status = client.status()
    assert status.family == "deepseek_v3"
    assert status.dtype == "float32"
    assert status.weights_copied_bytes == 0
    assert status.weights_shared_bytes > status.expert_bytes > 0
    assert status.rss_bytes > 10**8
    assert status.cache == engine.host.cache_tiers()
    assert status.fingerprint == hash_weights(present(engine.resident.twin).views(), engine.host.experts)


def test_a_session_from_creation_to_close(engine: Engine, client: ResidentClient, tmp_path: Path) -> None:
    before = client.status().fingerprint
    info = client.create_session("a", LORA)
    assert info.step == 0
    assert info.num_parameters == sum(v.numel() for v in sessions_of(engine.resident)["a"].parameters.values())
    losses = train(client, "a", 6)
    assert losses[-1] < losses[0]
    published = client.publish("a", "bob")
    assert engine.host.names == {"bob": published.lora_id}
    assert published.publish_ms > 0
    saved = client.save("a", str(tmp_path / "saved"))
    assert saved.step == 6
    assert saved.content_hash == published.version
    expected = train(client, "a", 2)
    assert client.load("a", str(tmp_path / "saved")).step == 6
    assert train(client, "a", 2) == expected
    assert [session.session for session in client.status().sessions] == ["a"]
    client.close_session("a")
    assert client.status(verify_weights=True).fingerprint == before
    assert client.status().sessions == []


def test_a_served_version_keeps_its_tensors_while_training_continues(engine: Engine, client: ResidentClient) -> None:
    client.create_session("a", LORA)
    first = client.publish("a", "bob")
    train(client, "a", 1)
    second = client.publish("a", "bob")
    assert first.version != second.version
    one, two = (engine.host.installed[reply.lora_id] for reply in (first, second))
    name = "model.layers.1.mlp.experts.up_proj"
    assert not one.modules[name].b.any()
    assert two.modules[name].b.any()


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_masters_that_are_not_finite_are_refused_and_the_version_before_stays(
    engine: Engine, client: ResidentClient, value: float
) -> None:
    client.create_session("a", LORA)
    train(client, "a", 1)
    first = client.publish("a", "bob")
    train(client, "a", 1)
    session = sessions_of(engine.resident)["a"]
    name = "model.layers.1.mlp.experts.up_proj.lora_B"
    session.parameters[name].data[2, 1, 0] = value
    session.copies.replaced([name])
    with pytest.raises(AdapterError, match=r"'model\.layers\.1\.mlp\.experts\.2\.up_proj\.lora_B\.weight' contains"):
        client.publish("a", "bob")
    assert engine.host.names == {"bob": first.lora_id}
    assert engine.host.reserved == set()
    (info,) = client.list_adapters()
    assert [version.version for version in info.versions] == [first.version] and info.current == first.version


@pytest.mark.slow
def test_a_version_has_the_hash_of_its_tensors_whatever_was_measured_before(
    engine: Engine, client: ResidentClient, tmp_path: Path
) -> None:
    """From the second publication on, the masters are measured beside the optimizer."""
    client.create_session("a", LORA)
    for steps in (0, 1, 2, 0):
        train(client, "a", steps)
        reply = client.publish("a", "bob")
        assert content_hash(engine.host.installed[reply.lora_id]) == reply.version
    client.save("a", str(tmp_path / "saved"))
    train(client, "a", 1)
    client.load("a", str(tmp_path / "saved"))
    assert client.publish("a", "bob").version == reply.version


@pytest.mark.slow
def test_a_second_session_starts_from_what_the_first_saved(client: ResidentClient, tmp_path: Path) -> None:
    client.create_session("a", LORA)
    train(client, "a", 2)
    client.save("a", str(tmp_path / "saved"))
    client.create_session("b", LoraSettings(rank=4, alpha=8.0, seed=5), start_from=str(tmp_path / "saved"))
    assert client.forward("a", sequences()).loss == client.forward("b", sequences()).loss
    with pytest.raises(ConflictError, match="rank 4"):
        client.create_session("c", LoraSettings(rank=2, alpha=8.0), start_from=str(tmp_path / "saved"))
    assert {session.session for session in client.status().sessions} == {"a", "b"}


@pytest.mark.slow
def test_two_sessions_at_once_get_what_each_gets_alone(start: Callable[..., Engine]) -> None:
    def alone(root: str, seed: int) -> list[float]:
        with start(root=root).client() as client:
            client.create_session("x", LoraSettings(rank=4, alpha=8.0, seed=seed))
            return train(client, "x", 4)

    engine = start(root="both")
    found: dict[int, list[float]] = {}

    def one(seed: int) -> None:
        with engine.client() as client:
            client.create_session(f"session{seed}", LoraSettings(rank=4, alpha=8.0, seed=seed))
            found[seed] = train(client, f"session{seed}", 4)

    threads = [threading.Thread(target=one, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[1] == alone("one", 1)
    assert found[2] == alone("two", 2)


def test_a_request_sent_twice_is_carried_out_once(client: ResidentClient) -> None:
    client.create_session("a", LORA)
    client.forward_backward("a", sequences())
    request = OptimStep(request_id="the very same", session="a", learning_rate=1e-2)
    first = client.wait(client.submit(request))[0]
    second = client.wait(client.submit(request))[0]
    assert first == second
    assert client.status().sessions[0].step == 1


def test_mistakes_are_answered_and_change_nothing(client: ResidentClient, tmp_path: Path) -> None:
    client.create_session("a", LORA)
    with pytest.raises(ConflictError, match="exists already"):
        client.create_session("a", LORA)
    with pytest.raises(InvalidValueError, match="rank 17"):
        client.create_session("b", LoraSettings(rank=17, alpha=1.0))
    with pytest.raises(UnknownNameError, match="q_prj"):
        client.create_session("b", LoraSettings(rank=4, alpha=1.0, targets=["q_prj"]))
    with pytest.raises(UnknownNameError, match=r"unknown session 'nobody'.*known: a"):
        client.forward("nobody", sequences())
    with pytest.raises(InvalidValueError, match=r"257 tokens.*256"):
        client.forward_backward("a", sequences(0, 257))
    with pytest.raises(InvalidValueError, match="300"):
        client.forward_backward("a", Batch.from_sequences([[1, 300]], [[1, 2]]))
    with pytest.raises(ConflictError, match="no gradient"):
        client.optim_step("a", 1e-3)
    with pytest.raises(NotFoundError):
        client.load("a", str(tmp_path / "nothing"))
    with pytest.raises(InvalidValueError, match="absolute"):
        client.save("a", "here")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConflictError, match="exists"):
        client.save("a", str(tmp_path / "there"))
    with pytest.raises(AdapterError):
        client.load_adapter("bob", str(tmp_path / "there"))
    with pytest.raises(UnknownNameError):
        client.rollback_adapter("bob")
    assert [(session.session, session.step) for session in client.status().sessions] == [("a", 0)]
    assert client.list_adapters() == []


def test_a_gradient_that_is_not_finite_is_refused_and_cleared(engine: Engine, client: ResidentClient) -> None:
    client.create_session("a", LORA)
    client.forward_backward("a", sequences())
    session = sessions_of(engine.resident)["a"]
    before = {name: value.detach().clone() for name, value in session.parameters.items()}
    next(iter(session.gradient.values())).fill_(float("nan"))
    with pytest.raises(NumericsError, match="no step was made"):
        client.optim_step("a", 1e-2)
    assert all(torch.equal(before[name], value) for name, value in session.parameters.items())
    train(client, "a", 1)
    assert client.status().sessions[0].step == 1


def test_a_fault_of_ours_is_answered_and_the_engine_continues(
    engine: Engine, client: ResidentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_session("a", LORA)
    with monkeypatch.context() as patch:
        patch.setattr(engine.resident.twin, "final_norm", lambda hidden: 1 / 0)
        with pytest.raises(RuntimeFault, match="ZeroDivisionError"):
            client.forward_backward("a", sequences())
    assert not sessions_of(engine.resident)["a"].gradient
    train(client, "a", 1)


def test_a_lost_device_is_not_answered_but_raised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loop ends the process: no later call could be answered."""

    def lost(*args: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    engine.paused.set()
    monkeypatch.setattr(engine.resident, "_immediate", lost)
    with pytest.raises(torch.AcceleratorError):
        engine.resident._dispatch(messages.ListAdapters(request_id="r"), {})
    fail = partial(engine.resident._fail, "r")
    scheduler = engine.resident.scheduler
    scheduler.submit(Work("s", failing_slices(), lambda _: None, fail, Slice("begin")))
    scheduler.run_slice(is_serving=False)
    with pytest.raises(torch.AcceleratorError):
        scheduler.run_slice(is_serving=False)


def failing_slices() -> Generator[Slice, int | None, None]:
    yield Slice("forward")
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


def test_publish_load_rollback_list_and_drop(engine: Engine, client: ResidentClient, tmp_path: Path) -> None:
    client.create_session("a", LORA)
    first = client.publish("a", "bob")
    train(client, "a", 1)
    second = client.publish("a", "bob")
    client.save("a", str(tmp_path / "saved"), optimizer=False)
    assert client.load_adapter("carol", str(tmp_path / "saved")).version == second.version
    back = client.rollback_adapter("bob")
    assert back.version == first.version
    adapters = {adapter.name: adapter for adapter in client.list_adapters()}
    assert adapters["bob"].current == first.version
    assert [version.source for version in adapters["bob"].versions] == ["session a"] * 2
    assert adapters["carol"].versions[0].source == str(tmp_path / "saved")
    for number, lora_id in enumerate((first.lora_id, "never heard of")):
        client.wait(client.submit(messages.DropAdapter(request_id=f"drop {number}", lora_id=lora_id)))
    assert first.lora_id not in engine.host.installed
    client.wait(client.submit(messages.ForgetAdapter(request_id="forget", name="carol")))
    assert [adapter.name for adapter in client.list_adapters()] == ["bob"]


def test_a_name_that_can_not_be_moved_is_an_error_and_the_copy_is_dropped(
    engine: Engine, client: ResidentClient
) -> None:
    client.create_session("a", LORA)
    engine.host.move_error = ConflictError("the frontend said no")
    with pytest.raises(ConflictError, match="said no"):
        client.publish("a", "bob")
    assert engine.host.installed == {}
    assert client.list_adapters() == []


def test_published_names_are_served_again_after_a_restart(start: Callable[..., Engine]) -> None:
    first = start()
    with first.client() as client:
        client.create_session("a", LORA)
        version = client.publish("a", "bob").version
    first.close()
    second = start()
    first.close = lambda: None  # type: ignore[method-assign]
    with second.client() as client:
        deadline = time.monotonic() + 60
        while client.list_adapters()[0].current is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.list_adapters()[0].current == version


@pytest.mark.slow
def test_a_client_that_goes_away_in_a_call_leaves_the_server_working(engine: Engine) -> None:
    with engine.client() as client:
        client.create_session("a", LORA)
        client.begin_forward_backward("a", sequences(0, *[30] * 40))
    with engine.client() as client:
        client.create_session("b", LORA)
        train(client, "b", 1)
        assert {session.session for session in client.status().sessions} == {"a", "b"}


@pytest.mark.slow
def test_a_request_that_names_another_session_first_is_not_held_up(engine: Engine, client: ResidentClient) -> None:
    """Sessions take turns between microbatches: a short call does not wait for the end of a long one."""
    client.create_session("long", LORA)
    client.create_session("short", LORA)
    engine.paused.set()
    batch = sequences(0, *[30] * 20)
    long = client.begin_forward_backward("long", batch)
    short = client.submit(
        ForwardBackward(request_id="short", session="short", lengths=[5]),
        {
            "tokens": np.ones(5, np.int32),
            "targets": np.ones(5, np.int32),
            "weights": np.ones(5, np.float32),
        },
    )
    engine.paused.clear()
    client.wait(short)
    assert long.reply is None
    client.finish_forward(long, batch)


@pytest.mark.slow
def test_an_idle_engine_sleeps_while_others_work_and_is_woken_when_they_are_done(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that reads an adapter, the frontend, a session's files, the hash of the weights."""
    engine, gate = start(), threading.Event()
    prepare, fingerprint = engine.host.prepare_adapter, engine.host.weights._compute

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any) -> Any:
            assert gate.wait(60)
            return function(*args)

        return waits

    monkeypatch.setattr(engine.host, "prepare_adapter", slowly(prepare))
    monkeypatch.setattr(engine.host.weights, "_compute", slowly(fingerprint))
    with engine.client() as client:
        client.create_session("a", LORA)
        publishes = client.submit(Publish(request_id="p", session="a", name="bob"))
        with engine.client() as other:
            status = other.submit(GetStatus(request_id="s"))
            while engine.host.weights._latest is None or not engine.resident._workers._running:
                time.sleep(0.005)
            other.status(wait_s=0)
            while engine.resident.has_work():
                time.sleep(0.005)
            turns = engine.asleep
            time.sleep(0.3)
            assert engine.asleep <= turns + 1  # it does not spin
            gate.set()
            client.wait(publishes)
            other.wait(status)
        client.save("a", str(tmp_path / "saved"))
    assert engine.overslept == 0


@pytest.mark.slow
def test_a_session_whose_forward_pass_is_not_finite_is_not_published(
    engine: Engine, client: ResidentClient, tmp_path: Path
) -> None:
    client.create_session("a", LORA)
    train(client, "a", 1)
    served = client.publish("a", "bob")
    client.close_session("a")
    client.create_session("a", LORA, str(write_adapter(tmp_path / "huge", huge_adapter(engine.host.config))))
    with pytest.raises(AdapterError, match="adapter 'bob': its forward pass is not finite: NaN or Inf from layer"):
        client.publish("a", "bob")
    assert engine.host.names == {"bob": served.lora_id}
    assert set(engine.host.installed) == {served.lora_id}
    client.create_session("b", LORA)
    train(client, "b", 1)


@pytest.mark.slow
def test_probing_leaves_a_session_under_way_as_it_was(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Adapters are loaded again and again between its slices; its losses are bit for bit those without."""

    def losses(engine: Engine, disturbed: bool) -> list[float]:
        path = write_adapter(
            tmp_path / f"adapter-{disturbed}", random_adapter(engine.host.config, rank=4, alpha=8.0, seed=1)
        )
        with engine.client() as client, engine.client() as other:
            client.create_session("a", LORA)
            found = []
            for step in range(3):
                ticket = client.begin_forward_backward("a", sequences(step, *[30] * 4))
                if disturbed:
                    other.load_adapter("bob", str(path))
                found.append(client.finish_forward(ticket, sequences(step, *[30] * 4)).loss)
                client.optim_step("a", 1e-2)
            return found

    assert losses(start(root="one"), True) == losses(start(root="two"), False)


def test_a_session_says_what_it_publishes_and_another_is_refused_before_it_trains(client: ResidentClient) -> None:
    client.create_session("a", LORA, publishes="bob")
    assert client.status().sessions[0].publishes == ["bob"]
    with pytest.raises(ConflictError, match="'bob' is published by session 'a' since"):
        client.create_session("b", LORA, publishes="bob")
    assert [session.session for session in client.status().sessions] == ["a"]
    client.create_session("b", LORA, publishes="bob", take_over=True)
    with pytest.raises(ConflictError, match="published by session 'b'"):
        client.publish("a", "bob")
    client.publish("b", "bob")
    (info,) = client.list_adapters()
    assert info.owner == "b" and info.versions[0].stored in (True, False)
    client.close_session("b")
    assert client.list_adapters()[0].owner is None


def test_the_command_lists_and_closes_sessions(
    engine: Engine, client: ResidentClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the real wire; what HTTP would say of the status comes from it too."""

    def get(api: Any, path: str) -> Any:
        assert path == "/kt/status"
        with engine.client() as other:
            status = msgspec.to_builtins(other.status(wait_s=0.0))
        return status | {"wire_address": engine.settings.wire_address}

    monkeypatch.setattr(ServerAPI, "get", get)
    monkeypatch.setenv("COLUMNS", "160")
    client.create_session("left", LORA, publishes="bob")
    client.create_session("busy", LORA)
    sessions_of(engine.resident)["left"].used_at -= 7300.0
    assert main(["session", "list"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("left") < shown.index("busy") and "bob" in shown and "2.0 h ago" in shown
    assert main(["session", "close", "lefd"]) == 2
    assert "unknown session 'lefd'; did you mean 'left'?" in capsys.readouterr().err
    assert main(["session", "close", "busy"]) == 2
    assert "session 'busy' is in use (last used " in capsys.readouterr().err
    assert main(["session", "close", "left"]) == 0
    assert "session left is closed" in capsys.readouterr().out
    assert main(["session", "close", "busy", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session"] == "busy"
    assert main(["session", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
