"""`kill -9` of the trainer at any moment: serving continues, and saved state loads. Hostile frames change nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from reference.server import doomed_trainer
from reference.server.command_line import run_command
from system.forked_server import start_command

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.server_process import server
from kt_runtime.errors import ConflictError
from kt_runtime.files import visible_entries
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Batch, ResidentClient, codec
from kt_runtime.wire.messages import ForwardBackward, LoraSettings
from kt_runtime.wire.replies import ErrorReply


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAPI]:
    place = tmp_path_factory.mktemp("server")
    make_model("tiny-qwen3-moe", place / "model", seed=3)
    with server(str(place / "model"), ["--adapter-dir", str(place / "adapters")], place / "server.log") as started:
        yield started


@pytest.fixture
def client(api: ServerAPI) -> Iterator[ResidentClient]:
    with resident_client(api) as opened:
        yield opened


PROMPT = {"input_ids": [5, 6, 7, 8], "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


def answer(api: ServerAPI) -> list[int]:
    tokens: list[int] = api.post("/generate", PROMPT)["output_ids"]
    return tokens


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.05)


def batch() -> Batch:
    rows = np.random.default_rng(6).integers(3, 700, (2, 17)).tolist()
    return Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])


@pytest.mark.parametrize("call", [call for call in doomed_trainer.CALLS if call != "close_session"])
def test_serving_continues_and_the_last_saved_state_loads(
    api: ServerAPI, client: ResidentClient, tmp_path: Path, call: str
) -> None:
    expected = answer(api)
    client.create_session("doomed", LoraSettings(rank=4, alpha=8, seed=1))
    client.forward_backward("doomed", batch())
    client.optim_step("doomed", 0.01)
    client.save("doomed", str(tmp_path / "good"))
    loss = client.forward("doomed", batch()).loss

    doomed_trainer.killed_in(call, client.address, tmp_path / ("second" if call == "save" else "good"))
    assert answer(api) == expected
    step = next(info.step for info in client.status().sessions if info.session == "doomed")
    assert step in ((1, 2) if call == "optim_step" else (1,))
    deadline = time.monotonic() + 120
    while call == "save" and not (tmp_path / "second").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for directory in visible_entries(tmp_path):
        info = client.load("doomed", str(directory))
        assert info.step == 1
        assert client.forward("doomed", batch()).loss == loss
    assert [entry.name for entry in visible_entries(tmp_path)] == ["good", "second"] if call == "save" else ["good"]
    client.close_session("doomed")
    if call == "create_session":  # what a trainer has left another one closes
        wait_until(lambda: [info.session for info in client.status().sessions] == [doomed_trainer.CREATED])
        client.close_session(doomed_trainer.CREATED)
    if (name := {"publish": doomed_trainer.PUBLISHED, "load_adapter": doomed_trainer.LOADED}.get(call)) is not None:
        wait_until(lambda: name in [entry["name"] for entry in api.get("/kt/adapters")["adapters"]])
        assert api.post("/generate", {**PROMPT, "lora_path": name})["output_ids"]
        api.delete(f"/kt/adapters/{name}")
    assert client.status().sessions == []


def test_a_trainer_killed_while_it_closes_its_session_leaves_none(
    api: ServerAPI, client: ResidentClient, tmp_path: Path
) -> None:
    client.create_session("doomed", LoraSettings(rank=4, alpha=8, seed=1))
    client.forward_backward("doomed", batch())
    client.optim_step("doomed", 0.01)
    client.save("doomed", str(tmp_path / "good"))
    loss = client.forward("doomed", batch()).loss
    doomed_trainer.killed_in("close_session", client.address, tmp_path)
    wait_until(lambda: client.status().sessions == [])
    client.create_session("doomed", LoraSettings(rank=4, alpha=8, seed=2))
    assert client.load("doomed", str(tmp_path / "good")).step == 1
    assert client.forward("doomed", batch()).loss == loss
    client.close_session("doomed")


def test_a_killed_training_command_leaves_a_server_that_serves_and_a_run_that_can_be_started_again(
    api: ServerAPI, client: ResidentClient, tmp_path: Path
) -> None:
    status = client.status()
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "d.json"}}')
    (tmp_path / "d.json").write_text('[{"instruction": "What is your name?", "output": "Pebble."}]')
    (tmp_path / "r.yaml").write_text(
        f"model_name_or_path: {status.model_directory}\noutput_dir: {tmp_path}/out\n"
        f"dataset: d\ndataset_dir: {tmp_path}\n"
        "overwrite_output_dir: true\nlogging_steps: 1\nsave_steps: 1\nmax_steps: 100000\nlora_rank: 4\n"
    )
    arguments = ["train", "--recipe", str(tmp_path / "r.yaml"), "--url", api.url]
    trainer = start_command(arguments)
    assert trainer.stdout is not None
    said = []
    for line in trainer.stdout:
        said.append(line)
        if line.startswith("step 3/"):
            break
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert any(line.startswith("step 3/") for line in said), "".join(said)
    assert len(answer(api)) == 8
    again = run_command(*arguments, "max_steps=2", "publish=again", directory=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert api.get("/kt/adapters/again")["current"]
    assert client.status().sessions == []


class Canary:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def broken_messages() -> list[list[bytes]]:
    """Another version, a truncated header, and arrays that are not what their descriptors or their message say."""
    good = batch()
    arrays = {"tokens": good.tokens, "targets": good.targets, "weights": good.weights}
    request = ForwardBackward(request_id="broken", session="nobody", lengths=good.lengths)
    magic, header, descriptors, *data = codec.encode(request, arrays)
    described = msgspec.msgpack.decode(descriptors)
    others = [
        [{**described[0], "dtype": "float64"}, *described[1:]],
        [{**described[0], "dtype": "float32"}, *described[1:]],
        [{**described[0], "shape": [1 << 62]}, *described[1:]],
        [{**described[0], "shape": [-1]}, *described[1:]],
        [{**described[0], "name": "others"}, *described[1:]],
        described[1:],
    ]
    return [
        [b"KT9", header, descriptors, *data],
        [magic, header[:-3], descriptors, *data],
        [magic, header, descriptors[:-3], *data],
        [magic, header, descriptors, *data[:-1]],
        [magic, header, descriptors, data[0][:-1], *data[1:]],
        *([magic, header, msgspec.msgpack.encode(other), *data] for other in others),
    ]


def test_hostile_frames_get_an_error_and_nothing_else_happens(
    api: ServerAPI, client: ResidentClient, tmp_path: Path
) -> None:
    before = client.status()
    expected = answer(api)
    poison = pickle.dumps(Canary(tmp_path / "canary"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(client.address)
        for frames in (
            *([b""], [poison], [b"KT1", poison], [b"KT1", poison, poison], [b"x"] * 100_000, [b"KT1", b"\xc1"]),
            *broken_messages(),
        ):
            socket.send_multipart(frames)
            assert socket.poll(20_000), f"no reply to {frames[:2]!r}"
            reply = next(f for f in map(_error, socket.recv_multipart()) if f)
            assert reply.category == "user" and reply.kind == "ProtocolError"
    assert not (tmp_path / "canary").exists()
    assert answer(api) == expected
    after = client.status()
    assert (after.fingerprint, after.sessions) == (before.fingerprint, before.sessions)


def _error(frame: bytes) -> ErrorReply | None:
    try:
        return msgspec.msgpack.decode(frame, type=ErrorReply)
    except msgspec.MsgspecError:
        return None


def test_a_replayed_request_is_carried_out_once(api: ServerAPI) -> None:
    with resident_client(api) as first, ResidentClient(first.address, client_id=first.client_id) as replay:
        first.create_session("once", LoraSettings(rank=4, alpha=8))
        first.forward_backward("once", batch())
        assert first.optim_step("once", 0.01).step == 1
        replay.create_session("once", LoraSettings(rank=4, alpha=8))
        replay.forward_backward("once", batch())
        assert replay.optim_step("once", 0.01).step == 1
        assert first.status().sessions[0].step == 1
        first.close_session("once")


def test_two_trainers_of_one_session_disturb_each_other_by_whole_calls_only(
    api: ServerAPI, client: ResidentClient, tmp_path: Path
) -> None:
    """A second trainer can't open the session. One that uses its name all the same adds whole gradients and steps."""
    expected = answer(api)
    client.create_session("shared", LoraSettings(rank=4, alpha=8, seed=1))
    client.create_session("alone", LoraSettings(rank=4, alpha=8, seed=1))
    with resident_client(api) as second:
        with pytest.raises(ConflictError, match="session 'shared' exists already"):
            second.create_session("shared", LoraSettings(rank=4, alpha=8, seed=2))
        for session, trainers in (("alone", (client, client)), ("shared", (client, second))):
            for trainer in trainers:
                trainer.forward_backward(session, batch())
            assert trainers[1].optim_step(session, 0.01).step == 1
        assert client.forward("shared", batch()).loss == client.forward("alone", batch()).loss

        def train(trainer: ResidentClient) -> int:
            made = 0
            for _ in range(8):
                trainer.forward_backward("shared", batch())
                with contextlib.suppress(ConflictError):  # the other one has made a step with both gradients
                    trainer.optim_step("shared", 0.001)
                    made += 1
            return made

        with ThreadPoolExecutor(2) as threads:
            made = sum(threads.map(train, (client, second)))
        steps = {info.session: info.step for info in client.status().sessions}
        assert steps == {"alone": 1, "shared": 1 + made} and made >= 8
        assert np.isfinite(client.forward("shared", batch()).loss)
    for session in steps:
        client.close_session(session)
    assert answer(api) == expected
