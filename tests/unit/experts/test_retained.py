"""backward refuses activations that another call than its own retained, and says what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.expert_problems import Problem, build_layer, present, random_problem, tensors_of

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import LoraSlot

Change = Callable[[dict[str, Any]], None]
EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 24, 16, 6, 2


@pytest.fixture
def problem() -> Problem:
    p = random_problem(EXPERTS, HIDDEN, INNER, TOKENS, TOP_K, ranks=(3, 5))
    p.ids = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, -1]]).int()
    p.token_slots = torch.tensor([0, 1, -1, 0, 1, 0]).int()
    p.slots = [replace(slot, dropout=0.25, seed=7) for slot in p.adapters]
    return p


def arguments_of(p: Problem) -> dict[str, Any]:
    return {
        "x": p.x.clone(),
        "ids": p.ids.clone(),
        "weights": p.weights.clone(),
        "slots": list(p.slots),
        "token_slots": present(p.token_slots).clone(),
    }


def at(name: str, place: int | tuple[int, int], value: float) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name][place] = value

    return change


def whole(**changes: Any) -> Change:
    return lambda arguments: arguments.update(changes)


def slot(**changes: Any) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments["slots"][1] = replace(arguments["slots"][1], **changes)

    return change


def rank(part: str, dimension: tuple[int, int], length: int) -> Change:
    """The adapter of one projection with another rank; the largest of all ranks stays what it is."""

    def change(arguments: dict[str, Any]) -> None:
        old = arguments["slots"][0]
        a, b = torch.zeros(EXPERTS, length, dimension[0]), torch.zeros(EXPERTS, dimension[1], length)
        arguments["slots"][0] = replace(old, **{f"{part}_a": a, f"{part}_b": b})

    return change


def shorter(arguments: dict[str, Any]) -> None:
    for name in ("x", "ids", "weights", "token_slots"):
        arguments[name] = arguments[name][:4]


def one_expert_fewer(arguments: dict[str, Any]) -> None:
    for name in ("ids", "weights"):
        arguments[name] = arguments[name][:, :1].contiguous()


OTHERS = {
    "fewer tokens": (shorter, r"x.shape\[0\] was 4 there and is 6 here"),
    "another top_k": (one_expert_fewer, r"ids.shape\[1\] was 1 there and is 2 here"),
    "another dtype": (
        lambda arguments: arguments.update(x=arguments["x"].bfloat16()),
        r"x's dtype was bfloat16 there and is float32 here",
    ),
    "other token counts": (at("ids", (0, 0), 3), r"ids\[0, 0\] was 3 there and is 0 here"),
    "the same token counts, of other tokens": (
        lambda arguments: arguments.update(ids=arguments["ids"][[2, 1, 0, 3, 4, 5]]),
        r"ids\[0, 1\] was 2 there and is 1 here",
    ),
    "a pair less": (at("ids", (4, 1), -1), r"ids\[4, 1\] was -1 there and is 3 here"),
    "a pair more": (at("ids", (5, 1), 0), r"ids\[5, 1\] was 0 there and is -1 here"),
    "another routing weight": (at("weights", (3, 1), 0.5), r"weights\[3, 1\] was 0.5"),
    "another token's slot": (at("token_slots", 2, 1), r"token_slots\[2\] was 1 there and is -1 here"),
    "a slot more": (
        lambda arguments: arguments["slots"].append(arguments["slots"][0]),
        r"the number of slots was 3 there and is 2 here",
    ),
    "gate's rank": (rank("gate", (HIDDEN, INNER), 2), r"slots\[0\].gate's rank was 2 there and is 3 here"),
    "up's rank": (rank("up", (HIDDEN, INNER), 4), r"slots\[0\].up's rank was 4 there and is 3 here"),
    "down's rank": (rank("down", (INNER, HIDDEN), 1), r"slots\[0\].down's rank was 1 there and is 3 here"),
    "no adapter in a slot": (
        lambda arguments: arguments["slots"].__setitem__(0, None),
        r"slots\[0\].gate's rank was 0 there and is 3 here",
    ),
    "another scaling": (slot(scaling=2.0), r"slots\[1\].scaling was 2.0.* there and is 0.75"),
    "another dropout": (slot(dropout=0.5), r"slots\[1\].dropout was 0.5.* there and is 0.25"),
    "another seed": (slot(seed=8), r"slots\[1\].seed was 8 there and is 7 here"),
    "a part of other experts": (slot(first_expert=4), r"slots\[1\].first_expert was 4 there and is 0 here"),
    "a part of other tokens": (
        slot(tokens=torch.tensor([0, 1, 2, 3, 4, 6])),
        r"slots\[1\].tokens\[5\] was 6 there and is 5 here",
    ),
}


@pytest.mark.parametrize("change_message", OTHERS.values(), ids=OTHERS.keys())
def test_activations_of_another_call_are_refused_before_anything_is_added(
    change_message: tuple[Change, str], problem: Problem
) -> None:
    change, message = change_message
    layer = build_layer(problem.experts)
    mine, other = arguments_of(problem), arguments_of(problem)
    change(other)
    _, retained = layer.forward_retaining(**other)
    into = [s.zeros() for s in problem.adapters]
    with pytest.raises(InvalidValueError, match="activations are of another call: .*" + message):
        layer.backward(problem.grad_out, **mine, into=into, retained=retained)
    assert all(not t.any() for s in into for t in tensors_of(s))


def test_activations_of_another_layer_are_refused(problem: Problem) -> None:
    one, two = build_layer(problem.experts), build_layer(problem.experts)
    arguments = arguments_of(problem)
    _, retained = one.forward_retaining(**arguments)
    with pytest.raises(InvalidValueError, match="its layer was another one"):
        two.backward(problem.grad_out, **arguments, retained=retained)


def test_activations_of_the_same_call_are_taken_whatever_the_seed_without_dropout(problem: Problem) -> None:
    layer = build_layer(problem.experts)
    problem.slots = [replace(s, dropout=0.0, seed=1) for s in problem.adapters]
    arguments = arguments_of(problem)
    _, retained = layer.forward_retaining(**arguments)
    wanted = layer.backward(problem.grad_out, **arguments)
    arguments["slots"] = [replace(s, seed=2) for s in problem.adapters]
    got = layer.backward(problem.grad_out, **arguments, retained=retained)
    assert torch.equal(got.x, wanted.x)


def test_a_larger_call_after_a_refused_smaller_one_does_not_read_its_memory() -> None:
    """The sizes of the retained rows follow from the routing: 200 pairs of one expert against 2 of another call."""
    p = random_problem(EXPERTS, HIDDEN, INNER, 100, TOP_K)
    layer = build_layer(p.experts)
    sparse = torch.full_like(p.ids, -1)
    sparse[0] = 0
    _, retained = layer.forward_retaining(p.x, sparse, p.weights)
    with pytest.raises(InvalidValueError, match=r"ids\[0, "):
        layer.backward(p.grad_out, p.x, torch.ones_like(p.ids), p.weights, retained=retained)
    _, retained = layer.forward_retaining(p.x, torch.ones_like(p.ids), p.weights, slots=[LoraSlot()])
    with pytest.raises(InvalidValueError, match="number of slots"):
        layer.backward(p.grad_out, p.x, torch.ones_like(p.ids), p.weights, retained=retained)
