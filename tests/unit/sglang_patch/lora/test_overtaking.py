"""Which adapters take new requests while a request for another one has waited too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kt_runtime.sglang_patch.lora.overtaking import PATIENCE_BATCHES, Overtaking


def request(lora_id: str | None, remaining: int = 8) -> Any:
    """Of which `remaining` tokens are to come."""
    return SimpleNamespace(
        lora_id=lora_id, output_ids=[1, 2], sampling_params=SimpleNamespace(max_new_tokens=remaining + 2)
    )


def two_at_once(adapters: set[str | None]) -> bool:
    return len(adapters - {None}) <= 2


def refused_at(rule: Overtaking, batch: int, *requests: Any) -> None:
    for each in requests:
        rule.note_refused(batch, each)


def test_after_so_many_batches_only_adapters_that_fit_beside_the_refused_one_take_requests() -> None:
    rule = Overtaking(two_at_once, lambda _: False)
    running = [request("short", 3), request("long", 3), request("long", 9), request("short", 5), request(None, 1)]
    waiting = [request("new"), request("short"), request("long"), request("other")]
    refused_at(rule, 10, waiting[0])
    rule.begin(10 + PATIENCE_BATCHES - 1, waiting, running)
    assert all(rule.allows(each.lora_id) for each in waiting)
    refused_at(rule, 10 + PATIENCE_BATCHES - 1, waiting[0])  # it waits since batch 10
    rule.begin(10 + PATIENCE_BATCHES, waiting, running)
    # "long" has the request that lasts longest, so "short" gives its slot away; the base takes no memory.
    assert [rule.allows(each) for each in ("new", "long", None, "short", "other")] == [True, True, True, False, False]


def test_the_rule_ends_when_the_request_runs_or_is_gone() -> None:
    for left, running in (([], []), ([request("new")], [request("new")])):
        rule = Overtaking(two_at_once, lambda _: False)
        new, old = request("new"), [request("a"), request("b")]
        refused_at(rule, 0, new)
        rule.begin(PATIENCE_BATCHES, [new], old)
        assert not (rule.allows("a") and rule.allows("b"))
        for batch in (PATIENCE_BATCHES + 1, PATIENCE_BATCHES + 2):
            rule.begin(batch, left, [*old, *running])
            assert rule.allows("a") and rule.allows("b")


def test_passes_that_ask_about_no_request_do_not_let_it_be_forgotten() -> None:
    """While a batch is full, SGLang asks about no waiting request."""
    rule = Overtaking(two_at_once, lambda _: False)
    new, running = request("new"), [request("a"), request("b")]
    refused_at(rule, 0, new)
    for batch in range(1, PATIENCE_BATCHES + 3):
        rule.begin(batch, [new], running)
    assert not (rule.allows("a") and rule.allows("b"))


def test_the_first_of_several_refused_requests_comes_first() -> None:
    rule = Overtaking(two_at_once, lambda _: False)
    one, other = request("one"), request("other")
    refused_at(rule, 0, one, other)
    rule.begin(PATIENCE_BATCHES, [one, other], [request("a"), request("b")])
    assert rule.allows("one") and not rule.allows("other")


def test_the_request_that_was_refused_first_comes_first_in_whatever_order_the_queue_is() -> None:
    rule = Overtaking(two_at_once, lambda _: False)
    one, other = request("one"), request("other")
    refused_at(rule, 5, one)
    refused_at(rule, 4, other)
    rule.begin(5 + PATIENCE_BATCHES, [one, other], [request("a"), request("b")])
    assert rule.allows("other") and not rule.allows("one")


def test_a_request_whose_adapter_is_being_copied_into_a_slot_holds_nobody_up() -> None:
    rule = Overtaking(two_at_once, {"new"}.__contains__)
    new = request("new")
    refused_at(rule, 0, new)
    rule.begin(PATIENCE_BATCHES, [new], [request("a"), request("b")])
    assert rule.allows("a") and rule.allows("b")
