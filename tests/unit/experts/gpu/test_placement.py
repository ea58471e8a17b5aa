"""The policy of hot experts: counts in, moves out. No tensors, no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.cases import examples

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.gpu.hot.placement import Move, Placement, Policy, slots_by_layer

E = 8
EAGER = Policy(half_life_steps=100, margin=1.5, least_count=1)


def uses(**counts: int) -> NDArray[np.int64]:
    """uses(e3=2): expert 3 twice."""
    made = np.zeros(E, np.int64)
    for name, count in counts.items():
        made[int(name[1:])] = count
    return made


def do(placement: Placement, most: int = 100) -> list[Move]:
    moves = placement.moves(most)
    for move in moves:
        placement.arrived(move)
    return moves


def test_free_slots_go_to_the_most_used_experts() -> None:
    placement = Placement(E, {0: 2}, policy=EAGER)
    placement.count(0, uses(e1=5, e4=9, e6=7))
    assert [(move.expert, move.evicted) for move in do(placement)] == [(4, None), (6, None)]
    assert set(placement.resident(0)) == {4, 6}


def test_a_full_layer_changes_only_for_a_clearly_more_used_expert() -> None:
    placement = Placement(E, {0: 1}, policy=EAGER)
    placement.count(0, uses(e1=10))
    do(placement)
    placement.count(0, uses(e2=14))
    assert do(placement) == []
    placement.count(0, uses(e2=1))
    assert do(placement) == [Move(0, 2, 0, evicted=1)]


def test_two_experts_with_equal_use_do_not_take_turns() -> None:
    """Without the margin they would: the plant shows that the test sees it."""

    def num_moves(policy: Policy) -> int:
        placement, generator = Placement(E, {0: 1}, policy=policy), np.random.default_rng(0)
        total = 0
        for _ in range(2000):
            placement.decay()
            placement.count(0, np.bincount(generator.integers(0, 2, 8), minlength=E))
            total += len(do(placement))
        return total

    assert num_moves(Policy(half_life_steps=100)) <= 2  # the first counts are few
    assert num_moves(Policy(half_life_steps=100, margin=1, least_count=0)) > 10


def test_what_was_hot_leaves_when_something_else_is() -> None:
    placement = Placement(E, {0: 2}, policy=EAGER)
    for hot in (0, 4):
        for _ in range(300):
            placement.decay()
            placement.count(0, uses(**{f"e{hot}": 2, f"e{hot + 1}": 2, "e7": 1}))
            do(placement, most=1)
        assert set(placement.resident(0)) == {hot, hot + 1}


def test_an_expert_is_not_resident_before_it_arrives_and_what_it_replaces_is_gone() -> None:
    placement = Placement(E, {0: 1}, policy=EAGER)
    placement.count(0, uses(e1=5))
    do(placement)
    placement.count(0, uses(e2=50))
    (move,) = placement.moves(5)
    assert (move.evicted, placement.resident(0)) == (1, {})
    assert placement.moves(5) == []
    placement.arrived(move)
    assert placement.resident(0) == {2: 0}


def test_the_most_useful_move_of_all_layers_comes_first() -> None:
    placement = Placement(E, {0: 1, 5: 1}, policy=EAGER)
    placement.count(0, uses(e1=5))
    placement.count(5, uses(e2=9))
    assert [(move.layer, move.expert) for move in placement.moves(1)] == [(5, 2)]


def test_rare_experts_are_not_worth_a_copy() -> None:
    placement = Placement(E, {0: 4}, policy=Policy(least_count=4))
    placement.count(0, uses(e1=3))
    assert placement.moves(9) == []


def test_slots_go_to_pinned_experts_and_then_evenly() -> None:
    assert slots_by_layer(of_size(10, 3), E, 79, {}) == {0: 3, 1: 2, 2: 2}
    assert slots_by_layer(of_size(10, 3), E, 70, {2: [0, 1, 2, 4]}) == {0: 2, 1: 1, 2: 4}
    assert slots_by_layer(of_size(10, 2), E, 10, {}) == {0: 1, 1: 0}
    assert slots_by_layer(of_size(10, 2), E, 1000, {}) == {0: E, 1: E}
    with pytest.raises(InvalidValueError, match="3 experts are pinned to the device, which has room for 2"):
        slots_by_layer(of_size(10, 2), E, 29, {0: [0, 1], 1: [3]})


def test_what_is_left_goes_to_layers_whose_slots_fit() -> None:
    """Layers of a GGUF file may have formats of their own."""
    assert slots_by_layer({1: 10, 2: 4}, E, 37, {}) == {1: 2, 2: 4}
    assert slots_by_layer({1: 10, 2: 4}, E, 9, {}) == {1: 0, 2: 2}
    with pytest.raises(InvalidValueError, match="3 experts are pinned to the device, which has room for 2"):
        slots_by_layer({1: 10, 2: 4}, E, 17, {1: [0], 2: [1, 2]})


def of_size(num_bytes: int, layers: int) -> dict[int, int]:
    return dict.fromkeys(range(layers), num_bytes)


@pytest.mark.parametrize(
    "bad", [{"margin": 0.9}, {"half_life_steps": 0}, {"least_count": -1}, {"margin": float("nan")}]
)
def test_a_policy_that_would_thrash_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError, match=f"{next(iter(bad))} of the placement is"):
        Policy(**bad)


class Device:
    """What a machine would hold that obeys the moves, and what is wrong with them."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        self.held: dict[int, list[int | None]] = {layer: [None] * count for layer, count in slots.items()}

    def obey(self, move: Move) -> None:
        held = self.held[move.layer]
        assert 0 <= move.slot < len(held), "a slot that the layer does not have"
        assert move.expert not in held, "an expert twice"
        assert held[move.slot] == move.evicted, "a slot whose expert was not named"
        held[move.slot] = move.expert


LAYERS = st.dictionaries(st.integers(0, 9), st.integers(0, E), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), slots=LAYERS, margin=st.floats(1, 4), least=st.floats(0, 5))
def test_slots_and_table_agree_whatever_is_counted(
    data: st.DataObject, slots: dict[int, int], margin: float, least: float
) -> None:
    pins: dict[int, Sequence[int]] = {
        layer: data.draw(st.lists(st.integers(0, E - 1), unique=True, max_size=count)) for layer, count in slots.items()
    }
    placement = Placement(E, slots, pins, Policy(20, margin, least))
    device, under_way = Device(slots), list[Move]()
    pinned_there = False
    for _ in range(data.draw(st.integers(1, 12))):
        layer = data.draw(st.sampled_from(sorted(slots)))
        placement.count(layer, np.array(data.draw(st.lists(st.integers(0, 30), min_size=E, max_size=E))))
        placement.decay(data.draw(st.integers(0, 40)))
        most = data.draw(st.integers(0, 5))
        moves = placement.moves(most)
        assert len(moves) <= most
        for move in moves:
            device.obey(move)
            assert move.evicted is None or move.evicted not in pins[move.layer]
        under_way += moves
        arriving = data.draw(st.integers(0, len(under_way)))
        for move in under_way[:arriving]:
            placement.arrived(move)
        del under_way[:arriving]
        for layer, held in device.held.items():
            waiting = {move.expert for move in under_way if move.layer == layer}
            found = {expert: slot for slot, expert in enumerate(held) if expert is not None and expert not in waiting}
            assert placement.resident(layer) == found
        there = all(set(experts) <= set(placement.resident(layer)) for layer, experts in pins.items())
        assert there or not pinned_there, "a pinned expert left"
        pinned_there = there


@given(
    counts=st.lists(st.integers(0, E), max_size=6),
    num_slots=st.integers(0, 60),
    pinned=st.integers(0, E),
    at=st.integers(0, 5),
)
def test_layers_never_get_more_slots_than_there_are(counts: list[int], num_slots: int, pinned: int, at: int) -> None:
    layers = of_size(7, len(counts))
    pins = {at: list(range(pinned))} if at in layers else {}
    if sum(map(len, pins.values())) > num_slots:
        with pytest.raises(InvalidValueError):
            slots_by_layer(layers, E, 7 * num_slots, pins)
        return
    slots = slots_by_layer(layers, E, 7 * num_slots, pins)
    assert sum(slots.values()) == min(num_slots, E * len(layers))
    assert all(len(pins.get(layer, ())) <= count <= E for layer, count in slots.items())
    unpinned = [count for layer, count in slots.items() if layer not in pins]
    assert not unpinned or max(unpinned) - min(unpinned) <= 1
