"""An attack on a real server: nothing ends, nothing stalls, the streams' tokens and the training run's losses stay.

FUZZ_SECONDS, FUZZ_SEED, FUZZ_STRICT and FUZZ_REPLAY are set by `make fuzz`: docs/testing.md.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from system.fuzz.asking import HANG_SECONDS, ask, fault_in
from system.fuzz.attack import Target, answer_to, attack_http, attack_otherwise, read_case, wire_fault, write_case
from system.fuzz.attended import Attended, attended, journal, under_way
from system.fuzz.bodies import Bodies, HttpCase, Places
from system.fuzz.findings import FINDINGS, Finding
from system.fuzz.room import grown
from system.fuzz.wire_cases import WireCases, WirePlaces

# How long, or else how many inputs: those that 20 s had room for on a busy machine.
SECONDS = float(os.environ["FUZZ_SECONDS"]) if "FUZZ_SECONDS" in os.environ else None
INPUTS = 2100
STRICT = bool(os.environ.get("FUZZ_STRICT"))
# `make test` attacks with the same inputs each time; `make fuzz` with others, unless it is told a seed.
SEED = int(os.environ.get("FUZZ_SEED") or (secrets.randbelow(10**6) if STRICT else 13))
REPLAYED = [Path(path) for path in os.environ.get("FUZZ_REPLAY", "").split()]
# Modules, tables and pools that the first inputs of each kind bring into being are no leak. Bounded records fill up
# during the first minutes: 16,384 ids of messages, 1,024 answers, the names of adapters that could not be stored.
WARM_UP_SECONDS = None if SECONDS is None else max(8.0, SECONDS / 12)
WARM_UP_INPUTS = 800
PRECIOUS_FILE = "thesis.tex"


class Keeper:
    """One server for all tests; another one after an input has ended it."""

    def __init__(self, place: Path) -> None:
        self._place, self._held, self.num_started = place, contextlib.ExitStack(), 0
        self._attended: Attended | None = None

    def attended(self) -> Attended:
        if self._attended is None or self._attended.troubles(time.monotonic()):
            self.close()
            self.num_started += 1
            place = self._place / f"server-{self.num_started}"
            self._attended = self._held.enter_context(attended(place, STRICT))
        return self._attended

    def close(self) -> None:
        """A server in trouble is killed; one that has died answers nothing any more."""
        held, self._attended = self._attended, None
        in_trouble = held is not None and bool(held.troubles(time.monotonic()))
        if held is not None and in_trouble:
            held.room.kill()
        with contextlib.suppress(Exception) if in_trouble else contextlib.nullcontext():
            self._held.close()


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path_factory.mktemp("fuzz"))
    yield keeper
    keeper.close()


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_past_finding(keeper: Keeper, finding: Finding) -> None:
    server = keeper.attended()
    begun = time.monotonic()
    try:
        finding.do(server.room)
    finally:
        troubles = _settled(server, begun)
        print(f"{finding.name}: {time.monotonic() - begun:.1f} s {troubles or ''}")
    assert not troubles, troubles


def _settled(server: Attended, begun: float) -> list[str]:
    """The troubles since, once every stream has had another token: a wait that lasts is then a gap."""
    counts = [len(stream.gaps) for stream in server.streams]
    deadline = time.monotonic() + 120.0
    while any(len(stream.gaps) == count for stream, count in zip(server.streams, counts, strict=True)):
        if server.troubles(begun):
            break
        if time.monotonic() > deadline:
            return ["a stream has had no token for two minutes"]
        time.sleep(0.05)
    return server.troubles(begun)


@pytest.mark.timeout((SECONDS or 0.0) + 900)
def test_attack(keeper: Keeper, tmp_path: Path) -> None:
    server = keeper.attended()
    print(f"FUZZ_SEED={SEED} FUZZ_SECONDS={SECONDS}; inputs that were answered wrongly: {tmp_path}")
    targets = [_target(server, tmp_path / "warm-up", SEED + 1), _target(server, tmp_path / "attack", SEED)]
    begun = time.monotonic()
    _attack(server, targets[0], WARM_UP_SECONDS, WARM_UP_INPUTS)
    before = _memory_after_flush(server)
    _attack(server, targets[1], SECONDS, INPUTS)
    after = _memory_after_flush(server)
    troubles = _settled(server, begun) + [fault for target in targets for fault in _faults(server, target, begun)]
    troubles += [f"memory of {name}: {sizes}" for name, sizes in grown(before, after).items()]
    if not Path(targets[0].wire_places.precious, PRECIOUS_FILE).exists():
        troubles.append("`save` has replaced a directory that it had not written")
    longest = max(gap.seconds for stream in server.streams for gap in stream.gaps)
    rounds = f"{sum(stream.num_answers for stream in server.streams)} streams, {server.run.num_rounds} training rounds"
    print(f"{rounds}; longest wait for a token {longest:.2f} {server.unit}, before the attack {server.quiet_gap_s:.2f}")
    assert not troubles, "\n".join([f"FUZZ_SEED={SEED}", *troubles])


if REPLAYED:

    @pytest.mark.parametrize("path", REPLAYED, ids=lambda path: path.name)
    def test_replayed(keeper: Keeper, path: Path) -> None:
        """One input that was written down, once more."""
        server = keeper.attended()
        begun = time.monotonic()
        case = read_case(path)
        if isinstance(case, HttpCase):
            answer = ask(server.room.address, case, HANG_SECONDS)
            print(answer.status, answer.body[:2000])
            fault = fault_in(case, answer)
        else:
            with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
                opened.connect(server.room.client.address)
                opened.send_multipart(list(case.frames))
                told = answer_to(opened, case, lambda: False)
            print(told)
            fault = wire_fault(told)
        assert not fault, fault
        assert not (troubles := _settled(server, begun)), troubles


def _target(server: Attended, directory: Path, seed: int) -> Target:
    room = server.room
    directory.mkdir()
    precious = room.place / "precious"
    precious.mkdir(exist_ok=True)
    (precious / PRECIOUS_FILE).write_text("years", encoding="utf-8")
    broken = tuple(map(str, room.broken))
    status = room.api.get("/kt/status")
    return Target(
        address=room.address,
        wire_address=status["wire_address"],
        openapi=room.api.get("/openapi.json"),
        places=Places(status["model"], str(room.good[0]), broken),
        wire_places=WirePlaces(
            str(room.good[0]), broken, str(room.place / "saved"), str(room.place / "new"), str(precious)
        ),
        good_adapters=tuple(map(str, room.good)),
        directory=directory,
        seed=seed,
    )


def _attack(server: Attended, target: Target, seconds: float | None, inputs: int) -> None:
    """Until the time is over or, without one, that many inputs were answered, or until the server is over."""
    if server.watch.ended:
        return
    context = multiprocessing.get_context("forkserver")  # it has imported most of theirs (forked_server.py)
    stop = context.Event()
    attackers = [context.Process(target=work, args=(target, stop)) for work in (attack_http, attack_otherwise)]
    for attacker in attackers:
        attacker.start()
    if seconds is not None:
        server.watch.any_ended.wait(seconds)
    else:
        while _num_answered(target.directory) < inputs and all(attacker.is_alive() for attacker in attackers):
            if server.watch.any_ended.wait(0.2):
                break
    stop.set()
    for attacker in attackers:
        attacker.join(120.0)
        attacker.kill()
    assert all(attacker.exitcode == 0 for attacker in attackers), "an attacker has failed; its traceback is above"


def _num_answered(directory: Path) -> int:
    return sum(path.read_bytes().count(b'"end": ') for path in directory.glob("*.jsonl"))


def _memory_after_flush(server: Attended) -> dict[str, int]:
    if server.watch.ended:
        return {}
    for stream in server.streams:
        stream.pause()
    try:
        server.room.flush()
        return server.room.memory()
    finally:
        for stream in server.streams:
            stream.resume()


def _faults(server: Attended, target: Target, begun: float) -> list[str]:
    """Wrong answers, and the inputs that were in progress when something ended or stood still."""
    facts = journal(target.directory)
    statuses = Counter(str(fact.get("status", "fault")) for fact in facts if "end" in fact)
    print(f"{target.directory.name}: {sum(statuses.values())} inputs; {dict(statuses.most_common())}")
    ended = server.watch.ended[1] - 1.0 if server.watch.ended else float("inf")  # after that nothing is answered
    wrong = [fact for fact in facts if "fault" in fact and fact["end"] < ended]
    found = [f"{target.directory / fact['case']}: {fact['fault']}" for fact in wrong]
    moments = [(gap.since, gap.until) for gap in server.gaps(begun)]
    if server.watch.ended:
        moments.append((server.watch.ended[1] - 2.0, server.watch.ended[1]))
    for since, until in moments:
        names = under_way(facts, since, until)
        if names:
            files = " ".join(_written(target, names))
            found.append(f"in progress from {since - begun:.1f} to {until - begun:.1f} s after the beginning: {files}")
    return found


def _written(target: Target, names: list[str]) -> list[str]:
    """The inputs as files; their names say how they are made. Those of `clients.py` are named alone."""
    bodies, messages = Bodies(target.openapi, target.places, target.seed), WireCases(target.wire_places, target.seed)
    made = []
    for name in names:
        kind, _, number = name.partition(f"-{target.seed}-")
        if kind in ("http", "wire") and number:
            case = (bodies if kind == "http" else messages).case(int(number))
            made.append(str(write_case(target.directory, case)))
        else:
            made.append(name)
    return made
