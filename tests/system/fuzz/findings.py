"""Every input that once ended, froze or misled a server, by name. What is found is added here, smallest form first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from system.fuzz.asking import Answer, ask, fault_in
from system.fuzz.bodies import HttpCase
from system.fuzz.clients import post
from system.fuzz.room import Room

from kt_runtime.errors import KtError, NumericsError, UserError
from kt_runtime.wire import Batch, codec
from kt_runtime.wire.messages import LoraSettings, MoveName

SMALL = {"max_new_tokens": 4, "temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]
CIRCLE = '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'
TAG_OF_NOTHING = '{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"$ref":"#"}}}'


@dataclass(frozen=True)
class Finding:
    """`do` attacks, and raises AssertionError where what it is told is wrong. That the server lives, that the streams
    have not waited and that the training run is right is checked after it."""

    name: str
    do: Callable[[Room], None]


def _generate(name: str, refused: bool | None = None, **fields: Any) -> Finding:
    return _posted(name, "/generate", {"input_ids": [5], "sampling_params": SMALL, **fields}, refused)


def _posted(
    name: str,
    path: str,
    body: dict[str, Any] | Callable[[], dict[str, Any]],
    refused: bool | None = None,
    **options: Any,
) -> Finding:
    """`refused`: the answer must be a 4xx (True) or 200 (False); None: either."""

    def do(room: Room) -> None:
        case = post(name, path, body() if callable(body) else body, **options)
        answer = ask(room.address, case, 60.0)
        check(case, answer, refused)

    return Finding(name, do)


def check(case: HttpCase, answer: Answer, refused: bool | None) -> None:
    assert fault_in(case, answer) is None, fault_in(case, answer)
    if refused is not None:
        assert (400 <= answer.status < 500) == refused, f"status {answer.status}: {answer.body[:300]!r}"


def _deep_schema(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"null"}' + "}}" * levels


def _wide_schema(properties: int) -> str:
    return json.dumps(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(properties)}}
    )


def _grammar(name: str, refused: bool | None = None, **grammar: str) -> Finding:
    return _generate(name, refused, sampling_params={"max_new_tokens": 8, **grammar})


def _session_is_replaced(room: Room) -> None:
    opened = ask(room.address, post("open", "/open_session", {"capacity_of_str_len": 1000, "session_id": "found"}))
    params = {"id": "found", "rid": None, "offset": 0, "replace": True}
    body = {"input_ids": [5], "sampling_params": SMALL, "session_params": params}
    for turn in range(2):
        case = post(f"turn {turn}", "/generate", body)
        check(case, ask(room.address, case), None)
    closing = post("close", "/close_session", {"session_id": "found"})
    assert opened.status != 200 or ask(room.address, closing).status != 500


def _adapter(damage: str) -> Finding:
    """Loaded, if the server takes it, and asked beside the base."""

    def do(room: Room) -> None:
        path = next(directory for directory in room.broken if directory.name == damage)
        case = post(damage, "/kt/adapters", {"name": "found", "path": str(path)})
        loaded = ask(room.address, case, 60.0)
        check(case, loaded, refused=True)
        body = {"input_ids": [[5], [5]], "lora_path": ["found", None], "sampling_params": SMALL}
        asked = post("asked", "/generate", body)
        check(asked, ask(room.address, asked, 60.0), refused=True)

    return Finding(f"adapter-{damage}", do)


def _blown_up(room: Room) -> None:
    """A step that is far too long, and the publication of what came of it."""
    rows = np.random.default_rng(1).integers(3, 700, (2, 17)).tolist()
    batch = Batch.from_sequences([row[:-1] for row in rows], [row[1:] for row in rows])
    room.client.create_session("found", LoraSettings(rank=4, alpha=8.0))
    try:
        for _ in range(2):
            room.client.forward_backward("found", batch)
            room.client.optim_step("found", 1e19)
        room.client.publish("found", "found")
        raise AssertionError("a version that computes no finite numbers was published")
    except (UserError, NumericsError):  # the step, the next gradient or the publication says that its numbers are none
        pass
    finally:
        room.client.close_session("found")
    asked = post("asked", "/generate", {"input_ids": [5], "lora_path": "found", "sampling_params": SMALL})
    check(asked, ask(room.address, asked), refused=True)


def _learning_rate(room: Room) -> None:
    rows = [[5, 6, 7, 8]]
    room.client.create_session("found", LoraSettings(rank=1, alpha=8.0))
    try:
        room.client.forward_backward("found", Batch.from_sequences(rows, rows))
        room.client.optim_step("found", 1e300)
    except UserError:
        pass  # any other error is the server's fault, and fails
    finally:
        room.client.close_session("found")


def _saved_below(path: str) -> Callable[[Room], None]:
    def do(room: Room) -> None:
        try:
            room.client.save("run", path)
        except UserError:
            return
        raise AssertionError(f"saved at {path}")

    return do


def _replaced(room: Room) -> None:
    """`replace` is for what `save` has written, and for nothing else."""
    precious = room.place / "precious"
    precious.mkdir(exist_ok=True)
    (precious / "thesis.tex").write_text("years", encoding="utf-8")
    try:
        room.client.save("run", str(precious), replace=True)
    except UserError:
        assert [path.name for path in precious.iterdir()] == ["thesis.tex"]
        return
    raise AssertionError("a directory that `save` had not written was replaced")


def _logging_writes(room: Room) -> None:
    before = _files(room.place)
    body = {
        "log_requests": True,
        "log_requests_level": 3,
        "dump_requests_folder": "dumped",
        "dump_requests_threshold": 1,
    }
    answer = ask(room.address, post("logging", "/configure_logging", body))
    ask(room.address, post("asked", "/generate", {"input_ids": [5], "sampling_params": SMALL}))
    written = {path for path in _files(room.place) - before if path.suffix == ".pkl"}
    assert not written and answer.status != 500, f"status {answer.status}, written: {sorted(map(str, written))}"


def _files(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if path.is_file()}


def _unknown_move(room: Room) -> None:
    """By whoever may reach the names socket: a name that comes to mean a copy that nobody has."""
    wire = room.api.get("/kt/status")["wire_address"].removeprefix("ipc://")
    # Killed servers have left sockets in the directory, and none of those answers.
    names = Path(wire).with_name(f"names-{room.address[1]}.sock")
    assert names.is_socket(), f"no names socket {names}"
    move = MoveName(
        request_id="m",
        name="found-nobody",
        adapter_version="0" * 64,
        lora_id="f" * 32,
        expires_at=time.monotonic() + 60,
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        opened.setsockopt(zmq.LINGER, 0)
        opened.connect(f"ipc://{names}")
        opened.send_multipart(codec.encode(move))
        assert opened.poll(60_000), "the frontend does not answer"
    asked = post("asked", "/generate", {"input_ids": [5], "lora_path": "found-nobody", "sampling_params": SMALL})
    check(asked, ask(room.address, asked, 60.0), refused=True)


def _many_sessions(room: Room) -> None:
    """Either there is a limit, or sessions cost nothing worth one."""
    names = [f"found-{number}" for number in range(200)]
    made = []
    try:
        for name in names:
            room.client.create_session(name, LoraSettings(rank=1, alpha=8.0, targets=["q_proj"]))
            made.append(name)
    except KtError as error:
        assert isinstance(error, UserError), error
    finally:
        for name in made:
            room.client.close_session(name)
    assert len(made) < len(names), f"{len(made)} sessions were opened"


FINDINGS: tuple[Finding, ...] = (
    # One request ends or freezes the server.
    _generate("custom-labels", custom_labels={"a": "b"}),
    _generate("positional-embed-overrides-list", True, positional_embed_overrides=[1]),
    _generate("positional-embed-overrides-dict", True, positional_embed_overrides={"a": 1}),
    _generate("positional-embed-overrides-text", True, positional_embed_overrides="x"),
    _generate("top-k-of-65-bits", True, sampling_params={**SMALL, "temperature": 1, "top_k": 2**63}),
    _generate(
        "stop-regex-catastrophic", sampling_params={"max_new_tokens": 64, "regex": "a{64}", "stop_regex": "(a+)+b$"}
    ),
    _generate("text-of-16-mb", True, input_ids=None, text="a b " * 4_000_000),
    _posted(
        "completion-of-16-mb",
        "/v1/completions",
        lambda: {"model": "model", "prompt": "a b " * 4_000_000, "max_tokens": 1},
        True,
    ),
    _posted(
        "chat-of-16-mb",
        "/v1/chat/completions",
        lambda: {"model": "model", "messages": [{"role": "user", "content": "a b " * 4_000_000}]},
        True,
    ),
    _grammar("schema-900-deep", json_schema=_deep_schema(900)),
    _grammar("schema-of-20000-properties", json_schema=_wide_schema(20_000)),
    _grammar("regex-of-10-mb", True, regex="(ab|cd)" * 1_500_000),
    _adapter("huge"),
    _adapter("large"),
    Finding("published-after-a-huge-step", _blown_up),
    _posted("start-profile", "/start_profile", {}),
    _posted("expert-distribution", "/start_expert_distribution_record", {}),
    Finding("session-replaced", _session_is_replaced),
    Finding("name-moved-to-nobody", _unknown_move),
    _generate("top-k-of-32-bits", True, sampling_params={**SMALL, "temperature": 1, "top_k": 2**31}),
    _generate("beams", True, sampling_params={**SMALL, "beam_width": 2}),
    _generate("samples-without-end", True, sampling_params={**SMALL, "n": 2**31 - 1}),
    _posted(
        "chat-samples-without-end", "/v1/chat/completions", {"model": "model", "messages": HELLO, "n": 2**31 - 1}, True
    ),
    _adapter("alpha"),
    # Answers other than they should be.
    _generate("top-logprobs-list", top_logprobs_num=[5], return_logprob=True),
    _generate("session-params-unknown", True, session_params={"x": 1}),
    _generate("input-embeds-empty", True, input_ids=None, input_embeds=[]),
    _generate("stop-regex-broken", True, sampling_params={**SMALL, "stop_regex": "("}),
    _grammar("schema-of-itself", json_schema='{"$ref":"#"}'),
    _posted("schema-error-shows-no-path", "/v1/chat/completions", {"messages": 5}, True),
    _grammar("schema-in-a-circle", True, json_schema=CIRCLE),
    _grammar("ebnf-of-nothing", True, ebnf="root ::= root"),
    _grammar("tag-of-nothing", True, structural_tag=TAG_OF_NOTHING),
    _generate(
        "more-tokens-than-the-grammar",
        sampling_params={"min_new_tokens": 8, "max_new_tokens": 16, "ebnf": 'root ::= "ab"'},
    ),
    # It was accepted, and ended each request of its batch that had min_new_tokens.
    _generate("stop-token-of-no-vocabulary", True, sampling_params={**SMALL, "stop_token_ids": [5, 10**6]}),
    _generate("sampling-list-for-one", sampling_params=[SMALL]),
    _generate("sampling-list-in-a-stream", sampling_params=[], stream=True),
    _generate("rid-list-empty", True, rid=[]),
    _posted("unknown-reasoning-parser", "/separate_reasoning", {"text": "a", "reasoning_parser": "x"}, True),
    _posted("unknown-tool-parser", "/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "x"}, True),
    _posted("function-call-of-a-list", "/parse_function_call", {"text": ["a"], "tools": []}, True),
    _posted("sagemaker-of-lists", "/invocations", {"model": ["model"], "messages": [HELLO]}, True),
    _posted(
        "template-arguments-twice",
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": {"add_generation_prompt": False}},
    ),
    _adapter("many-digits"),
    Finding("saved-below-proc", _saved_below("/proc/x")),
    Finding("learning-rate-1e300", _learning_rate),
    Finding("replace-of-anything", _replaced),
    Finding("logging-writes-pickles", _logging_writes),
    Finding("sessions-without-end", _many_sessions),
)
