"""What replicas make of each other's names, and of a registry that is late, gone, old or for another model."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reference.server.registry_members import Member, eventually, version_of

from kt_runtime.errors import AdapterError
from kt_runtime.registry.place import Place
from kt_runtime.serve.registry import replica as replicas

Make = Callable[..., Member]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PATIENCE_SECONDS", 0.1), ("RETRY_SECONDS", 0.05), ("BEAT_SECONDS", 0.1)):
        monkeypatch.setattr(replicas, name, seconds)


def is_everywhere(member: Member, name: str) -> bool:
    return not member.name(name).not_moved


def test_a_name_moves_on_every_replica_and_every_replica_knows_it(member: Make) -> None:
    one, two, three = (member(name) for name in ("one", "two", "three"))
    first = one.server.publish("bob", "first")
    for each in (one, two, three):
        eventually(partial(each.is_at, "bob", 1))
        assert each.server.names == {"bob": first}
    second = two.server.publish("bob", "second")
    for each in (one, two, three):
        eventually(partial(each.is_at, "bob", 2))
        eventually(partial(is_everywhere, each, "bob"))
        assert each.server.names == {"bob": second} and each.name("bob").published_by == two.id
    eventually(lambda: {each.url for each in one.report.replicas} == {"http://one", "http://two", "http://three"})
    eventually(lambda: all(each.behind == 0 for each in one.report.replicas))
    assert one.server.followed == [second] and two.server.followed == [first]  # never its own publication


def test_going_back_and_unloading_reach_every_replica(member: Make) -> None:
    one, two = member("one"), member("two")
    first = one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    one.server.publish("bob", "second")
    eventually(lambda: two.is_at("bob", 2))
    assert one.server.publish("bob", "first") == first
    eventually(lambda: two.is_at("bob", 3))
    assert two.server.names == {"bob": first}
    two.server.remove("bob")
    eventually(lambda: one.is_at("bob", 4) and two.is_at("bob", 4))
    assert one.server.names == two.server.names == {}
    assert two.server.publish("bob", "third")
    eventually(lambda: one.is_at("bob", 5))
    assert one.server.names == two.server.names


def test_a_replica_that_comes_back_catches_up(member: Make) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    one.server.publish("gone", "first")
    eventually(lambda: two.is_at("bob", 1) and two.is_at("gone", 1))
    two.stop()
    one.server.publish("bob", "second")
    one.server.publish("new", "first")
    one.server.remove("gone")
    eventually(lambda: one.is_at("bob", 2) and one.is_at("new", 1) and one.is_at("gone", 2))
    two.start()
    eventually(lambda: not two.replica.is_catching_up)
    assert two.server.names == one.server.names == {"bob": version_of("second"), "new": version_of("first")}
    assert [two.name(each).revision for each in ("bob", "gone", "new")] == [2, 2, 1]


def test_a_restart_without_news_moves_and_publishes_nothing(member: Make, root: Path) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    eventually(lambda: one.is_at("bob", 1) and two.is_at("bob", 1))
    for each in (one, two):
        each.stop()
        each.server.followed.clear()
        each.start()
        eventually(partial(each.is_at, "bob", 1))
    assert one.server.followed == two.server.followed == []
    assert len(list((root / "names" / "bob").iterdir())) == 1


def test_two_publishers_of_a_name_end_with_the_later_one_on_both(member: Make, root: Path) -> None:
    one, two = member("one"), member("two")

    def often(each: Member) -> None:
        for number in range(15):
            each.server.publish("bob", f"{each.root.name} {number}")

    threads = [threading.Thread(target=often, args=(each,)) for each in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: one.name("bob").revision == two.name("bob").revision and not one.name("bob").is_unpublished)
    eventually(lambda: one.server.names == two.server.names and not two.name("bob").is_unpublished)
    last = max((root / "names" / "bob").iterdir())
    eventually(lambda: one.is_at("bob", int(last.stem)) and two.is_at("bob", int(last.stem)))
    assert one.server.names["bob"] in {version_of("one 14"), version_of("two 14")}
    assert one.server.names["bob"] in last.read_text()


def test_a_publication_during_a_move_from_the_registry_wins(member: Make) -> None:
    one, two = member("one"), member("two")
    published: list[str] = []

    def publish() -> None:
        if not published:
            published.append(two.server.publish("bob", "meanwhile"))

    two.server.while_following = publish
    one.server.publish("bob", "first")
    eventually(lambda: published and one.is_at("bob", 2) and two.is_at("bob", 2))
    assert one.server.names == two.server.names == {"bob": published[0]}


@pytest.mark.parametrize("what", ["newest gone", "all gone", "older put back"])
def test_an_old_copy_of_the_registry_moves_no_name_back(member: Make, root: Path, what: str) -> None:
    one, two = member("one"), member("two")
    manifests = root / "names" / "bob"
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    old = manifests / "00000001.json"
    kept = old.read_bytes()
    second = one.server.publish("bob", "second")
    eventually(lambda: two.is_at("bob", 2))
    if what == "older put back":
        old.unlink()
        old.write_bytes(kept)
    else:
        (manifests / "00000002.json").unlink()
        if what == "all gone":
            old.unlink()
        eventually(lambda: "revision 2 was seen before: the name stays" in (two.name("bob").problem or ""))
    two.stop()
    two.start()
    eventually(lambda: not two.replica.is_catching_up)
    assert one.server.names == two.server.names == {"bob": second}
    third = two.server.publish("bob", "third")
    eventually(lambda: one.is_at("bob", 3) and two.is_at("bob", 3))
    assert one.server.names == {"bob": third}
    eventually(lambda: one.name("bob").problem is None)


def test_a_replica_that_died_while_it_was_behind_does_not_publish_its_old_version(member: Make) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    two.server.refuses = AdapterError("no room")
    second = one.server.publish("bob", "second")
    eventually(lambda: (two.name("bob").problem or "") == "no room")
    two.stop()
    two.server.refuses = None
    two.start()
    eventually(lambda: two.is_at("bob", 2))
    eventually(lambda: one.is_at("bob", 2))
    assert one.server.names == two.server.names == {"bob": second}


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_what_an_earlier_run_could_not_publish_is_published_unless_somebody_else_was_first(
    member: Make, root: Path, is_overtaken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1) and one.is_at("bob", 1))
    two.stop()
    mine = two.server.publish("bob", "mine")
    if is_overtaken:
        theirs = one.server.publish("bob", "theirs")
        eventually(lambda: one.is_at("bob", 2))
    two.start()
    revision = 2
    eventually(lambda: one.is_at("bob", revision) and two.is_at("bob", revision))
    wanted = theirs if is_overtaken else mine
    assert one.server.names == two.server.names == {"bob": wanted}
    assert (
        f"version {mine[:16]} of this server's earlier run never reached the registry" in caplog.text
    ) == is_overtaken


def test_adapters_from_before_the_registry_reach_it_and_do_not_replace_its_own(member: Make) -> None:
    one, two = member("one"), member("two", starts=False)
    one.server.publish("bob", "of the registry")
    eventually(lambda: one.is_at("bob", 1))
    two.server.publish("bob", "before")
    alice = two.server.publish("alice", "before")
    two.start()
    eventually(lambda: two.is_at("bob", 1) and two.is_at("alice", 1) and one.is_at("alice", 1))
    assert one.server.names == two.server.names == {"bob": version_of("of the registry"), "alice": alice}


def test_without_the_registry_names_go_on_and_what_changed_is_published_when_it_is_back(
    member: Make, root: Path, tmp_path: Path
) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    one.server.publish("alice", "first")
    eventually(lambda: two.is_at("bob", 1) and two.is_at("alice", 1))
    root.rename(tmp_path / "elsewhere")
    eventually(lambda: one.report.problem and two.report.problem)
    second = one.server.publish("bob", "second")
    two.server.remove("alice")
    assert one.server.names["bob"] == second
    eventually(lambda: one.name("bob").is_unpublished)
    assert not root.exists() and not one.replica.is_catching_up
    (tmp_path / "elsewhere").rename(root)
    eventually(lambda: one.is_at("bob", 2) and two.is_at("bob", 2) and one.is_at("alice", 2))
    assert one.server.names == two.server.names == {"bob": second}
    eventually(lambda: one.report.problem is None and two.report.problem is None)


def test_an_empty_directory_in_its_place_is_no_registry_also_after_a_restart(
    member: Make, root: Path, tmp_path: Path
) -> None:
    """A mount's point without its mount."""
    one = member("one")
    first = one.server.publish("bob", "first")
    eventually(lambda: one.is_at("bob", 1))
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    eventually(lambda: "base.json is missing" in (one.report.problem or ""))
    one.stop()
    one.start()
    eventually(lambda: "this server joined registry" in (one.report.problem or ""))
    assert not (root / "base.json").exists() and not (root / "names").exists()
    assert one.server.names == {"bob": first}
    shutil.rmtree(root)
    (tmp_path / "elsewhere").rename(root)
    eventually(lambda: one.is_at("bob", 1))


def test_a_registry_that_was_made_anew_gets_what_its_first_replica_serves(member: Make, root: Path) -> None:
    one, two = member("one"), member("two")
    for text in ("first", "second"):
        one.server.publish("bob", text)
    eventually(lambda: two.server.names == {"bob": version_of("second")} and not one.name("bob").is_unpublished)
    for each in (one, two):
        each.stop()
    shutil.rmtree(root)
    root.mkdir()
    one.forget_state()
    one.start()
    eventually(lambda: one.is_at("bob", 1))
    two.start()
    eventually(lambda: two.is_at("bob", 1))
    assert one.server.names == two.server.names == {"bob": version_of("second")}


def test_other_weights_are_refused_with_both_fingerprints(member: Make, root: Path) -> None:
    one, two = member("one"), member("two", starts=False)
    one.server.publish("bob", "first")
    eventually(lambda: one.is_at("bob", 1))
    two.server.weights = "b" * 64
    own = two.server.publish("alice", "own")
    two.start()
    eventually(lambda: two.report.problem is not None)
    said = two.report.problem or ""
    assert "a" * 64 in said and "b" * 64 in said and not two.replica.is_catching_up
    assert two.server.names == {"alice": own} and sorted(path.name for path in (root / "names").iterdir()) == ["bob"]


def test_a_manifest_for_other_weights_moves_no_name(member: Make, root: Path) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    text = (root / "names" / "bob" / "00000001.json").read_text()
    foreign = (
        text.replace("a" * 64, "b" * 64)
        .replace('"revision": 1', '"revision": 2')
        .replace(version_of("first"), version_of("other"))
    )
    (root / "names" / "bob" / "00000002.json").write_text(foreign)
    eventually(lambda: "a" * 64 in (two.name("bob").problem or "") and "b" * 64 in (two.name("bob").problem or ""))
    assert two.server.names == {"bob": version_of("first")}


def test_each_replica_says_where_a_name_has_not_moved_and_why(member: Make) -> None:
    one, two = member("one"), member("two")
    first = one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    two.server.refuses = AdapterError("rank 64: this server serves adapters up to rank 8")
    one.server.publish("bob", "second")
    eventually(lambda: any(each.problem for each in one.name("bob").not_moved))
    there = next(each for each in one.name("bob").not_moved if each.replica == two.id)
    assert there.revision == 1 and "up to rank 8" in (there.problem or "")
    assert two.server.names == {"bob": first} and "up to rank 8" in (two.name("bob").problem or "")
    eventually(lambda: [each.behind for each in one.report.replicas if each.replica == two.id] == [1])
    two.server.refuses = None
    eventually(lambda: two.is_at("bob", 2) and not one.name("bob").not_moved and two.name("bob").problem is None)


@pytest.mark.slow
def test_a_follower_without_room_keeps_its_version_and_follows_when_there_is_room(
    member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = member("one"), member("two")
    first = one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))

    def full(key: str, target: Path) -> tuple[int, str]:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(two.replica._registry.place, "download", full)
        second = one.server.publish("bob", "second")
        eventually(lambda: "No space left" in (two.name("bob").problem or ""))
        assert two.server.names == {"bob": first}
    eventually(lambda: two.is_at("bob", 2) and two.name("bob").problem is None)
    eventually(lambda: not list(two.server.adapters.glob(".registry/.tmp-*")))
    assert two.server.names == {"bob": second}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_a_damaged_file_is_not_served_and_is_taken_when_it_is_whole(member: Make, root: Path, damage: str) -> None:
    one, two = member("one"), member("two", starts=False)
    one.server.publish("bob", "first")
    eventually(lambda: one.is_at("bob", 1))
    (file,) = root.glob("data/*/*/weights")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[:-1])
    two.start()
    eventually(lambda: any(each.problem for each in two.report.names))
    assert two.server.names == {}
    file.write_bytes(whole)
    eventually(lambda: two.is_at("bob", 1) and not list(two.server.adapters.glob(".registry/.tmp-*")))
    assert two.server.names == one.server.names


def test_a_half_written_manifest_is_waited_for(member: Make, root: Path) -> None:
    one, two = member("one"), member("two")
    first = one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    whole = (root / "names" / "bob" / "00000001.json").read_text().replace('"revision": 1', '"revision": 2')
    half = root / "names" / "bob" / "00000002.json"
    half.write_text(whole[: len(whole) // 2])
    eventually(lambda: "revision 2 can't be read" in (two.name("bob").problem or ""))
    assert two.server.names == {"bob": first}
    half.write_text(whole)
    eventually(lambda: two.is_at("bob", 2))
    assert two.name("bob").problem is None
    half.write_text("")
    third = one.server.publish("bob", "third")  # the next number is above the damaged one
    eventually(lambda: two.is_at("bob", 3))
    assert two.server.names == {"bob": third}


class SlowPlace:
    """Reading waits until `answers` is set."""

    def __init__(self, place: Place) -> None:
        self.place, self.answers = place, threading.Event()
        self.poll_s = place.poll_s
        self.answers.set()

    def keys(self, prefix: str) -> list[str]:
        assert self.answers.wait(120)
        return self.place.keys(prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.place, name)


def test_a_registry_that_does_not_answer_delays_no_name_of_this_server(member: Make) -> None:
    one, two = member("one"), member("two", starts=False)
    slow: list[SlowPlace] = []

    def slowed(place: Place) -> Place:
        slow.append(SlowPlace(place))
        return slow[0]  # type: ignore[return-value]

    two.changed_place = slowed
    two.start()
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    slow[0].answers.clear()
    second = one.server.publish("bob", "second")
    eventually(lambda: two.report.waiting_s > 0.2)
    mine = two.server.publish("alice", "mine")
    assert two.server.names == {"bob": version_of("first"), "alice": mine}
    slow[0].answers.set()
    eventually(lambda: two.is_at("bob", 2) and one.is_at("alice", 1))
    assert one.server.names == two.server.names == {"bob": second, "alice": mine}


def test_clocks_that_are_days_apart_change_nothing(member: Make) -> None:
    one, two = member("one", starts=False), member("two", starts=False)
    one.wall, two.wall = (lambda: 1e9), (lambda: 1e9 - 5 * 86400)
    one.start()
    two.start()
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    second = two.server.publish("bob", "second")
    eventually(lambda: one.is_at("bob", 2) and len(one.report.replicas) == 2)
    assert one.server.names == {"bob": second}
    apart = next(each for each in one.report.replicas if each.replica == two.id)
    assert apart.clock_offset_s == -5 * 86400


@pytest.mark.slow
def test_a_version_that_is_not_on_disk_is_published_when_it_is(member: Make) -> None:
    one, two = member("one"), member("two")
    one.server.not_stored = "No space left on device (tried again)"
    one.server.publish("bob", "first", stores=False)
    eventually(lambda: "No space left on device" in (one.name("bob").problem or ""))
    assert one.name("bob").is_unpublished and two.server.names == {}
    one.server.store("bob", "first")
    eventually(lambda: two.is_at("bob", 1) and one.name("bob").problem is None)


def test_a_version_that_its_server_has_dropped_is_given_up(member: Make) -> None:
    one = member("one")
    one.server.publish("bob", "first", stores=False)
    eventually(lambda: not one.name("bob").is_unpublished)
    second = one.server.publish("bob", "second")
    eventually(lambda: one.is_at("bob", 1))
    assert one.server.names == {"bob": second}


def test_a_state_that_can_not_be_read_makes_a_new_replica_of_the_same_names(member: Make) -> None:
    one, two = member("one"), member("two")
    one.server.publish("bob", "first")
    eventually(lambda: two.is_at("bob", 1))
    before = two.id
    two.stop()
    (two.server.adapters / ".registry" / "state.json").write_text('{"replica": ')
    two.start()
    assert two.id != before
    eventually(lambda: two.is_at("bob", 1))
    eventually(lambda: one.is_at("bob", 1))
    assert one.server.names == two.server.names


@pytest.mark.slow
def test_a_replica_that_stops_signs_off_and_a_silent_one_is_shown(member: Make, root: Path) -> None:
    one, two = member("one"), member("two")
    eventually(lambda: len(one.report.replicas) == 2)
    beat = next((root / "replicas").glob(f"{two.id}.json")).read_bytes()
    silent = two.id
    two.stop()
    eventually(lambda: len(one.report.replicas) == 1)
    (root / "replicas" / f"{silent}.json").write_bytes(beat)  # killed, it would have stayed
    eventually(lambda: any(each.replica == silent and each.silent_s > 0.3 for each in one.report.replicas))
