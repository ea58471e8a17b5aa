"""Hot experts on a device: hits there and misses in the store are the layer, also while experts move.

Bodies of tests: a folder for a device imports them. Its conftest has the fixture `device`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, assert_close, build_layer, present, random_problem
from torch import Tensor

from kt_runtime import device as devices
from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts import ExpertLayer, LoraSlot
from kt_runtime.experts.gpu.hot.layer import HotExperts, expert_bytes
from kt_runtime.experts.gpu.hot.placement import Policy
from kt_runtime.experts.gpu.hot.set import NUM_CARRIERS, HotSet

E, H, INNER, T, K = 8, 96, 48, 6, 3
LAYER, SLOTS = 2, 3


class Served:
    """A layer in the store, and slots on a device for some of its experts."""

    def __init__(self, where: torch.device, pinned: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.where, self.dtype = where, dtype
        self.experts = moe.random_experts(E, H, INNER, seed=7)
        self.layer = build_layer(self.experts)
        size = (SLOTS + NUM_CARRIERS) * expert_bytes(self.layer.shape, dtype)
        self.set = HotSet({LAYER: self.layer}, self.layer.shape, dtype, where, size, {LAYER: pinned}, Policy(4, 1.2, 1))
        self.set.settle()
        self.set.attach()

    @property
    def hot(self) -> HotExperts:
        return self.set.layers[LAYER]

    def problem(self, seed: int, ranks: tuple[int, ...] = ()) -> Problem:
        made = random_problem(E, H, INNER, T, K, dtype=self.dtype, seed=seed, ranks=ranks)
        made.experts = self.experts
        return made

    def computed(self, problem: Problem) -> Tensor:
        """A step of one layer. The result is on the device, where nobody has waited for it."""
        call = _moved(self.where, problem)
        with self.set.step(decoded_tokens=T):
            return self.layer.forward(**call)

    def of_store(self, problem: Problem) -> Tensor:
        return self.layer.forward(problem.x, problem.ids, problem.weights, **problem.lora)


def _moved(where: torch.device, problem: Problem) -> dict[str, Any]:
    def slot_there(slot: LoraSlot | None) -> LoraSlot | None:
        return None if slot is None else slot.with_tensors([present(tensor).to(where) for tensor in slot.tensors()])

    token_slots = problem.token_slots
    return {
        "x": problem.x.to(where),
        "ids": problem.ids.to(where),
        "weights": problem.weights.to(where),
        "slots": [slot_there(slot) for slot in problem.slots],
        "token_slots": None if token_slots is None else token_slots.to(where),
    }


def _reference(problem: Problem) -> Tensor:
    slots = [None if slot is None else (slot.tensors(), slot.scaling) for slot in problem.slots]
    arguments = (problem.experts, problem.x, problem.ids, problem.weights)
    return moe.routed_experts(*arguments, slots=slots, token_slots=problem.token_slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hits_and_misses_together_are_the_layer(device: torch.device, dtype: torch.dtype) -> None:
    served = Served(device, [1, 4, 6], dtype)
    problem = served.problem(seed=1)
    got = served.computed(problem)
    assert served.hot.uses.hits > 0 and served.hot.uses.misses > 0
    assert_close(got.cpu(), _reference(problem), H + INNER, f"{dtype} on {device}")


def test_equal_placement_gives_equal_bits(device: torch.device) -> None:
    first, second = Served(device, [1, 4]), Served(device, [4, 1])
    problem = first.problem(seed=2)
    wanted = first.computed(problem).cpu()
    assert first.hot.table[1] != second.hot.table[1]  # in other slots
    assert torch.equal(second.computed(problem).cpu(), wanted) and torch.equal(first.computed(problem).cpu(), wanted)


def test_tokens_without_hits_or_with_adapters_have_the_bits_of_the_store(device: torch.device) -> None:
    served = Served(device, [1, 4, 6])
    problem = served.problem(seed=3, ranks=(4, 8))
    adapted = present(problem.token_slots) >= 0
    hits = torch.isin(problem.ids, torch.tensor([1, 4, 6])).any(1) & ~adapted
    got, wanted = served.computed(problem).cpu(), served.of_store(problem)
    assert adapted.any() and hits.any()
    assert torch.equal(got[~hits], wanted[~hits]) and not torch.equal(got[hits], wanted[hits])
    assert_close(got, _reference(problem), H + INNER, "with adapters")


def test_outside_of_a_step_the_store_computes_everything(device: torch.device) -> None:
    """As training does. What the slots hold does not matter."""
    served = Served(device, [1, 4, 6])
    problem = served.problem(seed=4)
    served.hot.w13.fill_(torch.nan)
    got = served.layer.forward(**_moved(device, problem))
    assert torch.equal(got.cpu(), served.of_store(problem))


def test_experts_that_move_change_no_step_before_or_after(device: torch.device) -> None:
    """Steps and moves are queued one after the other, and nobody waits for a result before the end."""
    served = Served(device, [])
    got, wanted, residents = [], [], set()
    for step in range(24):
        problem = served.problem(seed=100 + step)
        # Other experts are used every few steps, so that there is nearly always one on its way.
        problem.ids = torch.where(problem.ids < 0, -1, (problem.ids % 4 + 2 * (step // 6)) % E)
        got.append(served.computed(problem))
        wanted.append(_reference(problem))
        served.set.turn()
        residents.add(tuple(sorted(served.set.placement.resident(LAYER))))
    for step, (one, expected) in enumerate(zip(got, wanted, strict=True)):
        assert_close(one.cpu(), expected, H + INNER, f"step {step}")
    use = served.set.use()
    assert use.moves > SLOTS and len(residents) > 2 and use.layers[0].hits > T


def test_a_slot_is_filled_after_the_steps_that_read_it(device: torch.device) -> None:
    """All three experts of a step that nobody has waited for leave at once, and the copies of others are awaited."""
    served = Served(device, [])
    for residents, used in (([1, 4, 6], 50), ([0, 2, 3], 5000), ([5, 6, 7], 500000)):
        served.set.placement.count(LAYER, np.isin(np.arange(E), residents) * used)
        served.set.settle()
        assert sorted(served.set.placement.resident(LAYER)) == residents
        problem = served.problem(seed=used)
        problem.ids = torch.tensor(residents, dtype=torch.int32).expand(T, K).contiguous()
        got = served.computed(problem)
        served.set.placement.count(LAYER, ~np.isin(np.arange(E), residents) * used * 20)
        served.set.settle()
        assert not set(served.set.placement.resident(LAYER)) & set(residents)
        assert_close(got.cpu(), _reference(problem), H + INNER, f"after {residents} have left")


def test_streams_that_alternate_see_each_other_s_tables(device: torch.device) -> None:
    """SGLang's passes come on one stream with graphs, and on another without."""
    served = Served(device, [1, 4])
    streams = [devices.new_stream(device), devices.new_stream(device)]
    problems = [served.problem(seed=200 + step) for step in range(8)]
    calls = [_moved(device, problem) for problem in problems]
    for stream in streams:
        stream.wait_event(devices.recorded(devices.current_stream(device)))
    got = []
    for step, call in enumerate(calls):
        with devices.on(streams[step % 2]), served.set.step(decoded_tokens=T):
            got.append(served.layer.forward(**call))
        served.set.turn()
    for stream in streams:
        stream.synchronize()
    for one, problem in zip(got, problems, strict=True):
        assert_close(one.cpu(), _reference(problem), H + INNER, "on a stream of its own")


def test_a_call_that_fails_leaves_the_next_one_right(device: torch.device) -> None:
    served = Served(device, [1, 4])
    good, bad, wrong = served.problem(seed=5), served.problem(seed=6), served.problem(seed=7)
    bad.x[2, 3] = torch.nan
    wrong.ids[1, 1] = E
    with pytest.raises(NumericsError):
        served.computed(bad)
    with pytest.raises(InvalidValueError):
        served.computed(wrong)
    assert served.hot.uses.hits + served.hot.uses.misses == 0
    assert_close(served.computed(good).cpu(), _reference(good), H + INNER, "after failures")


def run_all(where: torch.device) -> None:
    """Every body; for tests that plant a fault."""
    for dtype in (torch.float32, torch.bfloat16):
        test_hits_and_misses_together_are_the_layer(where, dtype)
    test_equal_placement_gives_equal_bits(where)
    test_tokens_without_hits_or_with_adapters_have_the_bits_of_the_store(where)
    test_outside_of_a_step_the_store_computes_everything(where)
    test_experts_that_move_change_no_step_before_or_after(where)
    test_a_slot_is_filled_after_the_steps_that_read_it(where)
    test_streams_that_alternate_see_each_other_s_tables(where)
    test_a_call_that_fails_leaves_the_next_one_right(where)


def one_layer(where: torch.device) -> tuple[ExpertLayer, HotSet, dict[str, Any]]:
    """A layer with hot experts and a call on the device, for tests of what a call waits for."""
    served = Served(where, [1, 4])
    return served.layer, served.set, _moved(where, served.problem(seed=8))
