"""Every field of every request gets values that a hostile or mistaken client could send, over the real codec.

Whatever the server answers, it is a reply or the request's own fault: never a fault of the server's, never silence, and
the session that was there works as before.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from reference.cases import choose

from kt_runtime.errors import ProtocolError
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.server import Resident
from kt_runtime.wire import codec, messages, replies
from kt_runtime.wire.server import Incoming

REQUESTS = {request.__struct_config__.tag: request for request in get_args(messages.AnyRequest)}
BATCH = {
    "tokens": np.array([1, 2, 3], np.int32),
    "targets": np.array([2, 3, 4], np.int32),
    "weights": np.ones(3, np.float32),
}
SAMPLES = {"sampled": np.array([-1, -2, -3], np.float32), "advantages": np.array([1, -1, 0.5], np.float32)}
POLICY_LOSSES: list[dict[str, Any]] = [
    {"name": "policy", "kind": "ppo", "clip_low": 0.8, "clip_high": 1.2},
    {"name": "policy", "kind": "gspo", "clip_low": None, "clip_high": None},
    {"name": "policy", "kind": "dro", "beta": 0.1},
]
VALID: dict[str, dict[str, Any]] = {
    "get_status": {"verify_weights": False, "wait_s": 0.0},
    "create_session": {
        "session": "other",
        "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["q_b_proj"], "seed": 1},
        "start_from": None,
        "reference": None,
        "publishes": None,
        "take_over": False,
    },
    "forward": {
        "session": "s",
        "lengths": [3],
        "loss": {"name": "cross_entropy"},
        "model": "policy",
        "routing_replay": "off",
        "rollout_version": None,
    },
    "forward_backward": {
        "session": "s",
        "lengths": [3],
        "loss": {"name": "preference", "kind": "orpo", "beta": 0.1, "scale": 1.0, "ftx": 0.0, "gamma": 0.0},
        "activations": "recompute",
        "routing_replay": "off",
        "rollout_version": None,
    },
    "optim_step": {
        "session": "stepped",
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lora_plus_ratio": 1.0,
    },
    "save": {"session": "s", "path": "PLACE/saved", "optimizer": True, "replace": True},
    "load": {"session": "s", "path": "PLACE/nothing"},
    "publish": {"session": "s", "name": "bob", "take_over": False},
    "close_session": {"session": "gone"},
    "load_adapter": {"name": "bob", "path": "PLACE/nothing", "take_over": False},
    "follow_adapter": {"name": "bob", "path": "PLACE/nothing", "adapter_version": "0" * 64, "source": "elsewhere"},
    "rollback_adapter": {"name": "bob", "adapter_version": None},
    "list_adapters": {},
    "forget_adapter": {"name": "nobody"},
    "change_settings": {"changes": {"tpot_target_ms": 40.0, "train_share": 0.5, "weights": {"s": 2.0}}},
    "drop_adapter": {"lora_id": "none"},
}
NUMBERS = [-1, 0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, True, -1.0, -0.0, 5e-324, 1e-40, 1e38, 1e39, 1e300]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "",
    " ",
    "x" * 5000,
    "\0",
    "a\nb",
    "\u202e",
    "..",
    "-rf",
    "1e3",
    "a/b",
    "all",
    "reference",
    "%s%n{}",
    "😀" * 40,
]
LISTS = [[], [[]], [0], [-1], [2**62, 2**62], [1] * 70_000, ["all"] * 1000, ["x" * 10_000], [None], {}, {"a": 1}, None]
PATHS = ["relative", "/", "/proc/kt", "/proc/self/mem", "/proc/a/b", "/sys/kernel/kt", "/dev/null", "/dev/null/kt"]
PLACES = ["PLACE/file", "PLACE/file/below", "PLACE/pipe", "PLACE/pipe/below", "PLACE/pipe.gguf", "PLACE/socket"]
PLACES += ["PLACE/loop", "PLACE/loop/below", "PLACE/link", "PLACE/diary", "PLACE/" + "n" * 256, "PLACE/" + "d/" * 2100]
PLACES += ["PLACE/../up", "PLACE/empty.gguf", "PLACE/a\0b", "PLACE/diary.gguf"]


class Desk:
    """A resident whose requests come and go as frames."""

    def __init__(self, host: Any, place: Path) -> None:
        self.place = place
        self.numbers = itertools.count()
        self.waiting: list[Incoming] = []
        self.replies: dict[str, replies.Reply] = {}
        settings = ResidentSettings(
            model="", model_directory="", wire_address="", names_address="", adapter_directory=str(place / "adapters")
        )
        self.resident = Resident(host, settings, self)
        self.ask("create_session", VALID["create_session"] | {"session": "s"})

    wakeup_fd = -1

    @property
    def has_pending(self) -> bool:
        return bool(self.waiting)

    def take(self) -> list[Incoming]:
        taken, self.waiting = self.waiting, []
        return taken

    def answer(self, incoming: Incoming, reply: replies.Reply, arrays: Any = None) -> None:
        codec.encode(reply, arrays or {})  # what can't be encoded would be a fault of the server's
        self.replies[reply.request_id] = reply

    def close(self) -> None:
        pass

    def decoded(self, kind: str, fields: dict[str, Any]) -> Incoming | ProtocolError:
        """What the codec makes of a request."""
        header = {"type": kind, "version": messages.PROTOCOL_VERSION, "request_id": f"r{next(self.numbers)}"} | fields
        arrays = dict(BATCH) if kind in ("forward", "forward_backward") else {}
        if isinstance(loss := fields.get("loss"), dict) and loss.get("name") == "policy":
            arrays |= SAMPLES
        described = [{"name": name, "dtype": str(array.dtype), "shape": [3]} for name, array in arrays.items()]
        encode = msgspec.msgpack.encode
        frames = [codec.MAGIC, encode(header), encode(described), *(array.tobytes() for array in arrays.values())]
        try:
            request, decoded = codec.decode_request(frames)
        except ProtocolError as error:
            return error
        return Incoming(request, decoded, b"", request.request_id)

    def ask(self, kind: str, fields: dict[str, Any]) -> replies.Reply:
        incoming = self.decoded(kind, fields)
        assert isinstance(incoming, Incoming), incoming
        request = incoming.request
        self.waiting.append(incoming)
        deadline = time.monotonic() + 120
        while request.request_id not in self.replies:
            assert time.monotonic() < deadline, f"no answer to {request}"
            self.resident.apply(self.resident.decisions())
            self.resident.turn()
        return self.replies.pop(request.request_id)


@pytest.fixture(scope="module")
def desk(checkpoints: dict[str, Path], make_hosts: Callable[[], Any], tmp_path_factory: Any) -> Iterator[Desk]:
    place = tmp_path_factory.mktemp("place")
    (place / "file").write_text("x")
    (place / "empty.gguf").touch()
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "pipe.gguf")
    (place / "loop").symlink_to(place / "loop")
    (place / "diary").mkdir()
    (place / "diary" / "diary.txt").write_text("precious")
    (place / "diary.gguf").mkdir()
    (place / "link").symlink_to(place / "diary")
    desk = Desk(make_hosts(), place)
    yield desk
    desk.resident.close()


def hostile_values(desk: Desk) -> Iterator[Any]:
    step = choose(few=2, usual=1, every=1)
    for values in (NUMBERS, NOT_FINITE, TEXTS, LISTS, PATHS):
        yield from values[::step]
    yield from [None, b"bytes", {"name": "preference"}]
    for place in PLACES[::step]:
        yield place.replace("PLACE", str(desk.place))


def variants(desk: Desk, fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of `fields` with one field, or one of a field's own fields, changed."""
    for name, value in fields.items():
        for hostile in hostile_values(desk):
            yield f"{name}={str(hostile)[:40]!r}", fields | {name: hostile}
        if isinstance(value, dict):
            for inner, changed in variants(desk, value):
                yield f"{name}.{inner}", fields | {name: changed}
    yield "unknown field", fields | {"unheard_of": 1}


def trained(desk: Desk, session: str) -> list[Any]:
    """A step of a session that could be created, which is closed then."""
    named = {"session": session}
    return [
        desk.ask("forward_backward", VALID["forward_backward"] | named),
        desk.ask("optim_step", VALID["optim_step"] | named),
        desk.ask("forward", VALID["forward"] | named),
        desk.ask("close_session", named),
    ]


def placed(desk: Desk, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.replace("PLACE", str(desk.place)) if isinstance(value, str) else value
        for name, value in fields.items()
    }


@pytest.mark.parametrize("kind", REQUESTS)
def test_no_value_of_any_field_is_the_server_s_fault(desk: Desk, kind: str) -> None:
    assert {"type", *VALID[kind]} >= {"type", *REQUESTS[kind].__struct_fields__} - {"version", "request_id"}
    fields = placed(desk, VALID[kind])
    faults = []
    for what, changed in variants(desk, fields):
        if isinstance(desk.decoded(kind, changed), ProtocolError):
            continue
        if kind == "optim_step":
            desk.ask("create_session", VALID["create_session"] | {"session": "stepped"})
            desk.ask("forward_backward", VALID["forward_backward"] | {"session": "stepped"})
        answers = [desk.ask(kind, changed)]
        if kind == "optim_step":
            answers += trained(desk, "stepped")
        if kind == "create_session" and isinstance(answers[0], replies.SessionReply):
            answers += trained(desk, answers[0].info.session)
        for reply in answers:
            if isinstance(reply, replies.ErrorReply) and reply.category != "user":
                faults.append(f"{what}: {reply.kind}: {reply.message[:200]}")
    assert faults == []
    assert (desk.place / "diary" / "diary.txt").read_text() == "precious"
    works = desk.ask("forward", VALID["forward"])
    assert isinstance(works, replies.ForwardReply), works
    assert np.isfinite(works.loss)


@pytest.mark.parametrize("loss", POLICY_LOSSES, ids=lambda loss: str(loss["kind"]))
def test_no_setting_of_a_policy_loss_is_the_server_s_fault(desk: Desk, loss: dict[str, Any]) -> None:
    faults, num_computed = [], 0
    for what, changed in [("nothing changed", loss), *variants(desk, loss)]:
        fields = VALID["forward"] | {"loss": changed}
        if isinstance(desk.decoded("forward", fields), ProtocolError):
            continue
        reply = desk.ask("forward", fields)
        num_computed += isinstance(reply, replies.ForwardReply)
        if isinstance(reply, replies.ErrorReply) and reply.category != "user":
            faults.append(f"{what}: {reply.kind}: {reply.message[:200]}")
    assert faults == [] and num_computed > 0


def test_every_request_is_walked() -> None:
    assert VALID.keys() == REQUESTS.keys()
