"""The attack: processes that send inputs until they are told to stop, and write down what they did.

Each line of a journal is JSON: {"case", "at"} when an input is sent and {"case", "end", "status" or "fault"} when it is
answered, in seconds of CLOCK_MONOTONIC. A case without an end was in progress when the server died. Wrongly answered
inputs are written beside it as they were sent: `<case>.request`, or `<case>.message`, a msgpack list of frames.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import zmq
from system.fuzz.asking import HANG_SECONDS, LONG_ANSWER_SECONDS, PATIENCE_SECONDS, HungUp, ask, fault_in
from system.fuzz.bodies import Bodies, HttpCase, Places
from system.fuzz.clients import AdapterChurn, BadClients, post
from system.fuzz.wire_cases import WireCase, WireCases, WirePlaces

from kt_runtime.serve.http.route_table import Access, rule_for

HTTP_THREADS, WIRE_THREADS = 6, 2
PROBE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
# Errors of the server's category that are right answers: it is busy; the numbers of the session's own training have
# left float32, and nothing was changed.
TOLD_KINDS = {"ServerBusyError", "NumericsError"}
# Without a length of its own, or with null, an answer may continue to the end of the context.
_ASKS_LITTLE = re.compile(rb'"max_(new_|completion_|output_)?tokens": ?[0-9]{1,2}[,}]')
_ASKS_MUCH = re.compile(rb'"(n|min_new_tokens)": ?[0-9]{2,}|"n": ?[2-9]|"max_(new_|completion_|output_)?tokens": ?null')


@dataclass(frozen=True)
class Target:
    """What the attackers need to know of the server. `directory`: for their journals."""

    address: tuple[str, int]
    wire_address: str
    openapi: dict[str, Any] = field(repr=False)
    places: Places
    wire_places: WirePlaces
    good_adapters: tuple[str, ...]
    directory: Path
    seed: int


class Journal:
    """Thread-safe; every line is on its way to the kernel before the input is sent."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._file = (directory / f"{name}.jsonl").open("w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, case: str, **facts: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"case": case, **facts}) + "\n")

    def begin(self, case: str) -> None:
        self.write(case, at=time.monotonic())

    def end(self, case: str, **facts: Any) -> None:
        self.write(case, end=time.monotonic(), **facts)

    def fault(self, case: HttpCase | WireCase, fault: str) -> None:
        write_case(self._directory, case)
        self.end(case.name, fault=fault)


def write_case(directory: Path, case: HttpCase | WireCase) -> Path:
    """The input as a file that FUZZ_REPLAY takes."""
    if isinstance(case, HttpCase):
        path, content = directory / f"{case.name}.request", case.wire()
    else:
        path, content = directory / f"{case.name}.message", msgspec.msgpack.encode(case.frames)
    path.write_bytes(content)
    return path


def read_case(path: Path) -> HttpCase | WireCase:
    """What `write_case` has written."""
    content = path.read_bytes()
    if path.suffix == ".message":
        return WireCase(path.stem, "replayed", "", tuple(msgspec.msgpack.decode(content)), "replayed")
    return HttpCase(path.stem, content.split(b" ", 1)[0].decode("latin-1"), "", content, raw=content)


def attack_http(target: Target, stop: Event) -> None:
    """Grammar-made requests from several threads, and adapters that come and go."""
    _end_with_parent()
    journal = Journal(target.directory, "http")
    bodies = Bodies(target.openapi, target.places, target.seed)
    churn = AdapterChurn(target.seed, target.good_adapters, target.places.broken)
    makers = [_every(HTTP_THREADS, first, bodies.case) for first in range(HTTP_THREADS)]
    _run_all([partial(_ask_on, target, stop, journal, make) for make in [*makers, churn.next]])


def attack_otherwise(target: Target, stop: Event) -> None:
    """Messages of the training protocol, and clients that behave badly."""
    _end_with_parent()
    journal = Journal(target.directory, "wire")
    clients = BadClients(target.address, target.seed, stop.is_set)
    cases = WireCases(target.wire_places, target.seed)
    held = clients.half_open()
    makers = [_every(WIRE_THREADS, first, cases.case) for first in range(WIRE_THREADS)]
    wires = [lambda make=make: _tell_on(target, stop, journal, make) for make in makers]
    _run_all([*wires, clients.killed, clients.slow, clients.aborting])
    for connection in held:
        connection.close()


def _end_with_parent() -> None:
    """A killed test can't tell its attackers to stop: they would attack whichever server has the port next."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_all(works: list[Callable[[], None]]) -> None:
    """Raises what one of them raised, so that no attack weakens unnoticed."""
    with ThreadPoolExecutor(len(works)) as pool:
        for running in [pool.submit(work) for work in works]:
            running.result()


def _every(step: int, first: int, make: Callable[[int], Any]) -> Callable[[], Any]:
    numbers = iter(range(first, 2**62, step))
    return lambda: make(next(numbers))


def _ask_on(target: Target, stop: Event, journal: Journal, make: Callable[[], HttpCase]) -> None:
    while not stop.is_set():
        case = make()
        journal.begin(case.name)
        try:
            ask_one(target.address, case, journal)
        except OSError as error:  # nothing listens any more: the watch tells why
            journal.end(case.name, gone=str(error))
            return


def ask_one(address: tuple[str, int], case: HttpCase, journal: Journal) -> None:
    """Raises OSError when the server is gone."""
    try:
        answer = ask(address, case, LONG_ANSWER_SECONDS if _asks_much(case) else PATIENCE_SECONDS)
    except HungUp:
        journal.end(case.name, status="hung up")
        return
    except TimeoutError:
        _after_silence(address, case, journal)
        return
    fault = fault_in(case, answer)
    if fault:
        journal.fault(case, fault)
    else:
        journal.end(case.name, status=answer.status)


def _after_silence(address: tuple[str, int], case: HttpCase, journal: Journal) -> None:
    try:
        ask(address, post("probe", "/generate", PROBE), HANG_SECONDS)
    except TimeoutError:
        journal.fault(case, f"no answer, nor to a small request within {HANG_SECONDS:.0f} s")
        return
    if _asks_much(case):
        journal.end(case.name, status="slow")
    else:
        journal.fault(case, "no answer to a request that asks for little; others are answered")


def _asks_much(case: HttpCase) -> bool:
    """Whether an honest answer may be long in coming."""
    rule = rule_for(case.method, case.path)
    generates = rule is not None and rule.access is Access.GENERATE
    return generates and bool(_ASKS_MUCH.search(case.body) or not _ASKS_LITTLE.search(case.body))


def _tell_on(target: Target, stop: Event, journal: Journal, make: Callable[[], WireCase]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        opened.setsockopt(zmq.LINGER, 0)
        opened.connect(target.wire_address)
        while not stop.is_set():
            case = make()
            journal.begin(case.name)
            opened.send_multipart(list(case.frames))
            answer = answer_to(opened, case, stop.is_set)
            fault = None if stop.is_set() else wire_fault(answer)
            if fault:
                journal.fault(case, f"{case.kind} ({case.fault or 'whole'}): {fault}")
            else:
                journal.end(case.name, kind=case.kind, status=(answer or {}).get("kind") or (answer or {}).get("type"))


def answer_to(opened: zmq.Socket[bytes], case: WireCase, stop: Callable[[], bool]) -> dict[str, Any] | None:
    """Of frames that name no request, whichever answer comes."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and not stop():
        if not opened.poll(200):
            continue
        frames = opened.recv_multipart()
        answer: dict[str, Any] = msgspec.msgpack.decode(frames[1])
        if case.fault or answer.get("request_id") == case.request_id:
            return answer
    return None


def wire_fault(answer: dict[str, Any] | None) -> str | None:
    if answer is None:
        return f"no answer within {HANG_SECONDS:.0f} s"
    if answer.get("type") == "error" and answer.get("category") == "server" and answer.get("kind") not in TOLD_KINDS:
        return f"our fault: {answer.get('kind')}: {str(answer.get('message'))[:300]}"
    if "Traceback" in str(answer.get("message")):
        return f"shows a traceback: {str(answer.get('message'))[:300]}"
    return None
