"""The order of a session's requests, with an inbox in the wire server's place."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference.lora import random_adapter, write_adapter

from kt_runtime.adapters import as_version, content_hash, read_adapter
from kt_runtime.families import family_for
from kt_runtime.resident import handlers
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.routes.keys import TokenKeys
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.resident.server import Resident
from kt_runtime.resident.training import checkpoint
from kt_runtime.resident.training.session import SessionId
from kt_runtime.wire import messages
from kt_runtime.wire.messages import (
    AnyRequest,
    CloseSession,
    CreateSession,
    Forward,
    ForwardBackward,
    GetStatus,
    LoraSettings,
    OptimStep,
    PreferenceLoss,
    Publish,
)
from kt_runtime.wire.replies import PublishReply
from kt_runtime.wire.server import Incoming


def ahead_of(resident: Resident) -> Any:
    """What the handlers prepare ahead of a turn."""
    assert isinstance(resident.handlers, handlers.SessionHandlers)
    return resident.handlers._ahead


class Inbox:
    """In the place of a WireServer: requests that arrived together, and the answers in their order."""

    wakeup_fd = -1

    def __init__(self, requests: list[tuple[Any, dict[str, np.ndarray]]]) -> None:
        self._waiting = [Incoming(request, arrays, b"", request.request_id) for request, arrays in requests]
        self.replies: list[Any] = []

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[Incoming]:
        taken, self._waiting = self._waiting, []
        return taken

    def answer(self, incoming: Incoming, reply: Any, arrays: Any = None) -> None:
        self.replies.append(reply)

    def close(self) -> None:
        pass


def run(host: Any, inbox: Inbox, directory: Path) -> dict[str, Any]:
    """Serves until everything in the inbox is answered; the answers by request id."""
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(directory / "adapters")
    )
    expected = len(inbox._waiting)
    resident = Resident(host, settings, inbox)
    while len(inbox.replies) < expected:
        resident.apply(resident.decisions())
        resident.turn()
    resident.close()
    return {reply.request_id: reply for reply in inbox.replies}


def test_a_name_that_the_frontend_moves_at_once_is_answered_in_the_same_turn(
    make_host: Callable[..., Any], tmp_path: Path
) -> None:
    host = make_host("deepseek_v3")
    host.answers_at_once = True  # and never between two turns
    inbox = Inbox(
        [
            (CreateSession(request_id="0", session="a", lora=LoraSettings(rank=4, alpha=8.0)), {}),
            (Publish(request_id="1", session="a", name="name"), {}),
        ]
    )
    replies = run(host, inbox, tmp_path)
    assert isinstance(replies["1"], PublishReply) and list(host.names) == ["name"] and not host.moves


def test_a_publication_takes_two_turns_however_much_time_training_owes(
    make_host: Callable[..., Any], tmp_path: Path
) -> None:
    """The first begins to prepare the version, the second moves the name. So a stream waits for one step at most."""
    host = make_host("deepseek_v3")
    host.answers_at_once = True
    lora = LoraSettings(rank=2, alpha=4.0, targets=["attention"])
    inbox = Inbox([(CreateSession(request_id="open", session="s", lora=lora), {})])
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(tmp_path / "adapters")
    )
    resident = Resident(host, settings, inbox)

    def turn() -> None:
        resident.apply(resident.decisions())
        resident.turn()

    while not inbox.replies:
        turn()
    host.serving = True
    resident.scheduler._not_before = math.inf  # no slice is planned
    publish = Publish(request_id="publish", session="s", name="carol")
    inbox._waiting = [Incoming(publish, {}, b"", "publish")]
    turn()
    ends = time.monotonic() + 60
    while not resident._ended and time.monotonic() < ends:
        time.sleep(0.01)
    assert len(inbox.replies) == 1
    turn()
    assert [reply.request_id for reply in inbox.replies] == ["open", "publish"]
    assert isinstance(inbox.replies[1], PublishReply)
    resident.close()


@pytest.mark.parametrize("follows", [False, True])
def test_a_load_that_was_read_ahead_takes_one_turn(
    make_host: Callable[..., Any], tmp_path: Path, follows: bool
) -> None:
    host = make_host("deepseek_v3")
    host.answers_at_once = True
    write_adapter(tmp_path / "carol", random_adapter(host.config, rank=4, alpha=8.0, seed=2, only=["attention"]))
    inbox = Inbox([])
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(tmp_path / "adapters")
    )
    resident = Resident(host, settings, inbox)
    resident.apply(resident.decisions())
    resident.turn()
    place = str(tmp_path / "carol")
    request: AnyRequest = messages.LoadAdapter(request_id="load", name="carol", path=place)
    if follows:
        adapter = read_adapter(place, resident.family, host.config, host.max_lora_rank)
        version = content_hash(as_version(adapter, resident.family, host.config))
        request = messages.FollowAdapter(request_id="load", name="carol", path=place, adapter_version=version)
    incoming = Incoming(request, {}, b"", "load")
    resident.arrives(incoming)
    assert resident._workers.finish(60)
    inbox._waiting = [incoming]
    resident.apply(resident.decisions())
    resident.turn()
    assert [type(reply) for reply in inbox.replies] == [PublishReply] and not resident._ahead
    resident.close()


@pytest.fixture
def trained(make_host: Callable[..., Any], make_batch: Any, tmp_path: Path) -> Iterator[tuple[Resident, Inbox, Any]]:
    """A resident with session `s`, which has made a step, and a function that sends requests and runs a turn."""
    host = make_host("deepseek_v3")
    host.answers_at_once = True
    inbox = Inbox([])
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(tmp_path / "adapters")
    )
    resident = Resident(host, settings, inbox)

    def send(*requests: tuple[Any, dict[str, np.ndarray]]) -> None:
        for request, arrays in requests:
            incoming = Incoming(request, arrays, b"", request.request_id)
            resident.arrives(incoming)
            inbox._waiting.append(incoming)

    def turn() -> None:
        resident.apply(resident.decisions())
        resident.turn()

    turn()
    lora = LoraSettings(rank=2, alpha=4.0, targets=["attention"])
    send((CreateSession(request_id="open", session="s", lora=lora), {}), *a_step(make_batch, "0"))
    while len(inbox.replies) < 3:
        turn()
    inbox.replies.clear()
    yield resident, inbox, SimpleNamespace(send=send, turn=turn, make_batch=make_batch, host=host)
    resident.close()


def a_step(make_batch: Any, request_id: str) -> list[tuple[Any, dict[str, np.ndarray]]]:
    batch = make_batch(20, 9)
    arrays = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    backward = ForwardBackward(request_id=f"backward {request_id}", session="s", lengths=batch.lengths)
    return [
        (backward, arrays),
        (OptimStep(request_id=f"step {request_id}", session="s", learning_rate=1e-2), {}),
    ]


def test_a_small_session_s_publication_takes_the_turn_in_which_it_is_taken(
    trained: tuple[Resident, Inbox, Any],
) -> None:
    """Its version is prepared between its arrival and the engine's turn, however much time training owes."""
    resident, inbox, server = trained
    server.host.serving = True
    resident.scheduler._not_before = math.inf  # no slice is planned
    server.send((Publish(request_id="publish", session="s", name="carol"), {}))
    assert resident._workers.finish(60)
    server.turn()
    assert [type(reply) for reply in inbox.replies] == [PublishReply]
    assert len(server.host.placed) == 1 and not ahead_of(resident) and not resident._workers._jobs
    modules = [each for each in resident.family.lora_modules(server.host.config) if ".self_attn." in each.name]
    parameters = sum(2 * (each.in_features + each.out_features) for each in modules)
    assert server.host.slot_bytes == [parameters * server.host.dtype.itemsize]


@pytest.mark.slow
def test_a_publication_whose_session_has_other_requests_is_not_prepared_ahead(
    trained: tuple[Resident, Inbox, Any],
) -> None:
    """The masters change before it is its turn: what it publishes is what they are then."""
    resident, inbox, server = trained
    server.send(*a_step(server.make_batch, "1"), (Publish(request_id="late", session="s", name="carol"), {}))
    assert not ahead_of(resident)
    while len(inbox.replies) < 3:
        server.turn()
    server.send((Publish(request_id="again", session="s", name="dave"), {}))
    assert ahead_of(resident) == {"publish again"}
    while len(inbox.replies) < 4:
        server.turn()
    late, again = inbox.replies[2:]
    assert isinstance(late, PublishReply) and isinstance(again, PublishReply) and late.version == again.version


@pytest.mark.slow
def test_nothing_is_prepared_ahead_while_requests_may_be_open_that_were_not_announced(
    trained: tuple[Resident, Inbox, Any],
) -> None:
    """Those that came while the resident was built."""
    resident, inbox, server = trained
    resident._knows_open = False
    backward, step = a_step(server.make_batch, "1")
    inbox._waiting = [Incoming(request, arrays, b"", request.request_id) for request, arrays in (backward, step)]
    server.turn()
    server.send((Publish(request_id="publish", session="s", name="carol"), {}))
    assert not ahead_of(resident)
    while len(inbox.replies) < 3:
        server.turn()
    server.turn()
    server.send((Publish(request_id="again", session="s", name="carol"), {}))
    assert ahead_of(resident)
    while len(inbox.replies) < 4:
        server.turn()


@pytest.mark.slow
def test_a_session_s_next_request_waits_for_what_is_still_prepared_ahead(
    trained: tuple[Resident, Inbox, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the publication is refused: the masters must not change while they are copied."""
    resident, inbox, server = trained
    gate, real = threading.Event(), checkpoint.taken_masters

    def gated(session: Any) -> Any:
        assert gate.wait(60)
        return real(session)

    monkeypatch.setattr(checkpoint, "taken_masters", gated)
    other = SessionId("other", "other")
    resident.publisher.owners.begin(other)
    resident.publisher.owners.claim("carol", other)
    server.send((Publish(request_id="refused", session="s", name="carol"), {}))
    server.send(*a_step(server.make_batch, "1"))
    for _ in range(20):
        server.turn()
    assert not inbox.replies
    gate.set()
    while len(inbox.replies) < 3:
        server.turn()
    assert [reply.request_id for reply in inbox.replies] == ["refused", "backward 1", "step 1"]
    assert inbox.replies[0].kind == "ConflictError" and not resident._workers._jobs


def test_what_is_prepared_ahead_is_small_and_of_a_session_that_exists(
    trained: tuple[Resident, Inbox, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, inbox, server = trained
    monkeypatch.setattr(handlers, "SMALL_BYTES", 1)
    server.send((Publish(request_id="large", session="s", name="carol"), {}))
    server.send((Publish(request_id="unknown", session="t", name="carol"), {}))
    assert not ahead_of(resident)
    while len(inbox.replies) < 2:
        server.turn()
    replies = {reply.request_id: reply for reply in inbox.replies}
    assert isinstance(replies["large"], PublishReply) and replies["unknown"].kind == "UnknownNameError"
    assert not resident._open._of


@pytest.mark.slow
def test_requests_of_a_session_that_arrive_together_keep_their_order(
    make_host: Callable[..., Any], make_batch: Any, tmp_path: Path
) -> None:
    batch = make_batch(20, 9)
    arrays = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    call = {"session": "a", "lengths": batch.lengths}
    inbox = Inbox(
        [
            (CreateSession(request_id="0", session="a", lora=LoraSettings(rank=4, alpha=8.0)), {}),
            (ForwardBackward(request_id="1", **call), arrays),
            (ForwardBackward(request_id="2", **call), arrays),
            (OptimStep(request_id="3", session="a", learning_rate=1e-2), {}),
            (Forward(request_id="4", **call), arrays),
            (Publish(request_id="5", session="a", name="bob"), {}),
            (CloseSession(request_id="6", session="a"), {}),
            (Forward(request_id="7", **call), arrays),
        ]
    )
    replies = run(make_host(), inbox, tmp_path)
    assert replies["1"].loss == replies["2"].loss > replies["4"].loss
    assert replies["3"].step == 1
    assert replies["5"].name == "bob"
    assert replies["7"].kind == "UnknownNameError"


LORA = LoraSettings(rank=4, alpha=8.0, targets=["attention"])


def arrays_of(batch: Any, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights} | more


def test_a_preference_step_with_a_reference_adapter(make_host: Callable[..., Any], pairs: Any, tmp_path: Path) -> None:
    """What a DPO trainer does: the reference's log-probabilities, a step against them, the margin afterwards."""
    host, loss = make_host(), PreferenceLoss(kind="sigmoid", beta=0.5, scale=1 / 3)
    adapter = random_adapter(host.config, rank=4, alpha=8.0, seed=2, only=["attention"])
    path = str(write_adapter(tmp_path / "start", adapter))
    call = {"session": "a", "lengths": pairs.lengths, "loss": loss}
    reference = np.array([-30, -50, -40, -12, -6, -38], np.float32)
    inbox = Inbox(
        [
            (CreateSession(request_id="0", session="a", lora=LORA, start_from=path, reference=path), {}),
            (Forward(request_id="1", model="reference", **call), arrays_of(pairs)),
            (Forward(request_id="2", **call), arrays_of(pairs, reference=reference)),
            (Forward(request_id="3", model="base", **call), arrays_of(pairs)),
            (ForwardBackward(request_id="4", **call), arrays_of(pairs, reference=reference)),
            (OptimStep(request_id="5", session="a", learning_rate=1e-2), {}),
            (Forward(request_id="6", **call), arrays_of(pairs, reference=reference)),
            (Forward(request_id="7", model="reference", **call), arrays_of(pairs)),
        ]
    )
    replies = run(host, inbox, tmp_path)
    assert replies["4"].loss == replies["2"].loss
    assert replies["6"].loss < replies["2"].loss
    assert replies["1"].metrics["logps/chosen"] == replies["7"].metrics["logps/chosen"]
    assert replies["1"].metrics["logps/chosen"] == replies["2"].metrics["logps/chosen"]
    assert replies["1"].metrics["logps/chosen"] != replies["3"].metrics["logps/chosen"]
    assert replies["4"].num_computed < replies["4"].num_tokens == sum(pairs.lengths)


def test_adapters_that_do_not_fit_are_refused_before_there_is_a_session(
    make_host: Callable[..., Any], tmp_path: Path
) -> None:
    host = make_host()
    good = write_adapter(tmp_path / "good", random_adapter(host.config, rank=4, alpha=8.0, seed=2, only=["attention"]))
    high = write_adapter(tmp_path / "high", random_adapter(host.config, rank=17, alpha=8.0, seed=2, only=["attention"]))
    other = write_adapter(tmp_path / "other", random_adapter(make_host("qwen3_moe").config, rank=4, alpha=8.0, seed=2))
    wrong: list[dict[str, Any]] = [
        {"reference": str(tmp_path / "nothing")},
        {"reference": "relative"},
        {"reference": str(high)},
        {"reference": str(other)},
        {"start_from": str(other), "reference": str(good)},
    ]
    requests: list[tuple[Any, dict[str, Any]]] = [
        (CreateSession(request_id=str(i), session="a", lora=LORA, **more), {}) for i, more in enumerate(wrong)
    ]
    inbox = Inbox([*requests, (CreateSession(request_id="good", session="a", lora=LORA, reference=str(good)), {})])
    replies = run(host, inbox, tmp_path)
    kinds = [replies[str(i)].kind for i in range(len(wrong))]
    assert kinds == ["NotFoundError", "InvalidValueError", "AdapterError", "AdapterError", "AdapterError"]
    assert "is 17, above this server's largest" in replies["2"].message
    assert replies["good"].info.session == "a"


def test_what_is_no_pair_is_refused_and_leaves_no_gradient(
    make_host: Callable[..., Any], make_batch: Any, pairs: Any, tmp_path: Path
) -> None:
    loss, odd = PreferenceLoss(kind="simpo", beta=2.0), make_batch(5, 4, 3)
    pairs.weights[: pairs.lengths[0]] = 0
    inbox = Inbox(
        [
            (CreateSession(request_id="0", session="a", lora=LORA), {}),
            (ForwardBackward(request_id="1", session="a", lengths=odd.lengths, loss=loss), arrays_of(odd)),
            (ForwardBackward(request_id="2", session="a", lengths=pairs.lengths, loss=loss), arrays_of(pairs)),
            (OptimStep(request_id="3", session="a", learning_rate=1e-2), {}),
        ]
    )
    replies = run(make_host(), inbox, tmp_path)
    assert [replies[i].kind for i in "123"] == ["InvalidValueError", "InvalidValueError", "ConflictError"]
    assert "pair 0: the chosen answer" in replies["2"].message


def test_a_call_finds_the_routes_of_the_version_that_its_session_published(
    make_host: Callable[..., Any], make_batch: Any, tmp_path: Path
) -> None:
    """The engine keeps them when it serves the version: here when it is installed."""
    host, batch = make_host(), make_batch(20, 9)
    store = host.routes = route_store(host)
    install, versions = host.install_adapter, []

    def installed(lora_id: str, name: str, version: str, prepared: object) -> None:
        versions.append(version)
        first = np.zeros((20, store.num_layers, store.top_k), np.int32) + np.arange(store.top_k)
        store.put(TokenKeys(version).extend(batch.tokens[:20]), first)
        install(lora_id, name, version, prepared)

    host.install_adapter = installed
    call: dict[str, Any] = {"session": "a", "lengths": batch.lengths}
    replay: dict[str, Any] = {"routing_replay": "rollout"}
    forward = [
        (Forward(request_id="before", **call, **replay), arrays_of(batch)),
        (Publish(request_id="publish", session="a", name="served"), {}),
    ]
    inbox = Inbox([(CreateSession(request_id="0", session="a", lora=LORA), {}), *forward])
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(tmp_path)
    )
    resident = Resident(host, settings, inbox)

    def answers(count: int) -> dict[str, Any]:
        while len(inbox.replies) < count:
            resident.apply(resident.decisions())
            resident.turn()
        return {reply.request_id: reply for reply in inbox.replies}

    assert answers(3)["publish"].version == versions[0]
    for request_id, more in {
        "after": replay,
        "compared": {"routing_replay": "compare"},
        "named": {**replay, "rollout_version": versions[0]},
        "other": {**replay, "rollout_version": "0" * 64},
    }.items():
        asked = ForwardBackward(request_id=request_id, **call, **more)
        inbox._waiting.append(Incoming(asked, arrays_of(batch), b"", request_id))
    answers(7)
    inbox._waiting.append(Incoming(GetStatus(request_id="status"), {}, b"", "status"))
    replies = answers(8)
    resident.close()
    found = {name: reply.metrics for name, reply in replies.items() if hasattr(reply, "metrics")}
    replayed = {name: (each["routes/replayed"], each["routes/missed"]) for name, each in found.items()}
    assert replayed == {"before": (0, 29), "after": (20, 9), "compared": (0, 9), "named": (20, 9), "other": (0, 29)}
    assert 0 < found["after"]["routes/moved"] <= 20 and found["other"]["routes/moved"] == 0
    assert replies["before"].loss == replies["compared"].loss == replies["other"].loss != replies["after"].loss
    assert replies["after"].loss == replies["named"].loss
    kept = replies["status"].kept_routes
    assert (kept.tokens, kept.found_tokens, kept.missed_tokens) == (20, 60, 85)


def test_a_replay_that_can_not_be_is_refused_before_anything_is_computed(
    make_host: Callable[..., Any], make_batch: Any, tmp_path: Path
) -> None:
    batch = make_batch(5)
    call: dict[str, Any] = {"session": "a", "lengths": batch.lengths}
    wrong = {
        "without": ({**call, "routing_replay": "rollout"}, "this server keeps no routes; start it with --routing-rep"),
        "version": ({**call, "rollout_version": "abc"}, "rollout_version works with routing_replay: compare or roll"),
        "base": ({**call, "routing_replay": "compare", "model": "base"}, "works with model policy only, not base"),
    }
    requests: list[tuple[Any, dict[str, Any]]] = [(CreateSession(request_id="0", session="a", lora=LORA), {})]
    requests += [(Forward(request_id=name, **each), arrays_of(batch)) for name, (each, _) in wrong.items()]
    requests.append((OptimStep(request_id="step", session="a", learning_rate=1e-2), {}))
    replies = run(make_host(), Inbox(requests), tmp_path)
    assert all(said in replies[name].message for name, (_, said) in wrong.items())
    assert [replies[name].kind for name in wrong] == ["ConflictError", "InvalidValueError", "InvalidValueError"]
    assert "no gradient" in replies["step"].message


def route_store(host: Any) -> RouteStore:
    family = family_for(host.config)
    sizes = (len(family.moe_layers(host.config)), family.num_experts_per_tok(host.config), 8)
    return RouteStore(*sizes, 100 * RouteStore.bytes_of_token(*sizes))


def test_status_says_what_a_recipe_is_compared_with(make_host: Callable[..., Any], tmp_path: Path) -> None:
    host = make_host()
    status = run(host, Inbox([(GetStatus(request_id="0"), {})]), tmp_path)["0"]
    assert status.gpu_experts is host.gpu_experts and status.expert_streaming is host.expert_streaming
    found = (status.expert_threads, status.chunked_prefill_tokens, status.microbatch_tokens)
    assert found == (host.experts.num_threads, host.chunked_prefill_tokens, 2048)
    assert sum(status.expert_node_bytes) == status.expert_bytes and status.expert_placement == ""
    assert (status.step, status.step_exceptions) == (host.step, ["it has an adapter"])
    assert (status.exact, status.not_exact) == (False, host.not_exact)
    assert (status.step_decode_batches, status.step_decode_tokens, status.step_decode_seconds) == (3, 5, 0.25)
    assert (status.head_decode_seconds, status.sampling_decode_seconds) == (0.5, 0.125)


def test_a_session_beyond_the_limits_is_refused_until_another_one_is_closed(
    make_host: Callable[..., Any], tmp_path: Path
) -> None:
    def create(number: int) -> CreateSession:
        lora = LoraSettings(rank=4, alpha=8.0, targets=["q_b_proj"])
        return CreateSession(request_id=str(number), session=f"s{number}", lora=lora)

    closing = CloseSession(request_id="c", session="s0")
    requests: list[messages.AnyRequest] = [create(0), create(1), create(2), closing, create(3)]
    # Sessions take turns: all requests of one turn are executed before those of the next one arrive.
    found: dict[str, Any] = {}
    host, inbox = make_host(), Inbox([])
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(tmp_path), max_sessions=2
    )
    resident = Resident(host, settings, inbox)
    for request in requests:
        inbox._waiting.append(Incoming(request, {}, b"", request.request_id))
        while len(inbox.replies) <= len(found):
            resident.apply(resident.decisions())
            resident.turn()
        found[request.request_id] = inbox.replies[-1]
    status = resident.handlers.infos()
    resident.close()
    assert [found[name].__class__.__name__ for name in "013"] == ["SessionReply"] * 3
    assert found["2"].kind == "ConflictError"
    assert "2 sessions are open, and --max-sessions is 2: s0 (step 0, " in found["2"].message
    assert [each.session for each in status] == ["s1", "s3"]
    assert status[0].num_bytes == 16 * status[0].num_parameters
