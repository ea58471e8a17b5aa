"""Hot experts against float64 and against the store, with CPU memory as the device; and faults that are planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, assert_close, build_layer, present, random_problem
from torch import Tensor

from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts import ExpertLayer
from kt_runtime.experts.gpu.call import ExpertCall
from kt_runtime.experts.gpu.hot import layer as hot_module
from kt_runtime.experts.gpu.hot import set as hot_set
from kt_runtime.experts.gpu.hot import slots as slots_module
from kt_runtime.experts.gpu.hot.layer import MOST_TOKENS, HotExperts
from kt_runtime.experts.gpu.hot.placement import Policy
from kt_runtime.experts.gpu.hot.set import NUM_CARRIERS, HotSet
from kt_runtime.experts.gpu.hot.slots import Form, PackedSlots, PlainSlots, expert_bytes, slot_bytes

E, H, INNER, T, K = 8, 96, 48, 24, 3
LAYER = 2


@dataclass
class Case:
    problem: Problem
    layer: ExpertLayer
    set: HotSet

    @property
    def hot(self) -> HotExperts:
        return self.set.layers[LAYER]

    @property
    def slots(self) -> PlainSlots:
        assert isinstance(self.hot.slots, PlainSlots)
        return self.hot.slots

    def computed(self, *, decoded_tokens: int = T, out: Tensor | None = None, **changed: Any) -> Tensor:
        """One call within a serving step."""
        call = call_of(self.problem, **{**self.problem.lora, **changed})
        with self.set.step(decoded_tokens=decoded_tokens):
            assert self.hot.takes(call)
            return self.hot.forward(self.layer, call, out)

    def of_store(self, **changed: Any) -> Tensor:
        problem = self.problem
        call = {"x": problem.x, "ids": problem.ids, "weights": problem.weights, **problem.lora, **changed}
        return self.layer.forward(**call)

    def reference(self) -> Tensor:
        problem = self.problem
        slots = [None if slot is None else (slot.tensors(), slot.scaling) for slot in problem.slots]
        return moe.routed_experts(
            problem.experts, problem.x, problem.ids, problem.weights, slots=slots, token_slots=problem.token_slots
        )


def call_of(problem: Problem, **changed: Any) -> ExpertCall:
    """For the base unless `changed` has slots."""
    given = {"x": problem.x, "ids": problem.ids, "weights": problem.weights, "slots": (), "token_slots": None}
    return ExpertCall(**{**given, **changed})


def case(
    pinned: list[int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    slots: int = 4,
    expert_format: str | None = None,
    form: Form = "model",
    **kwargs: Any,
) -> Case:
    problem = random_problem(E, H, INNER, T, K, dtype=dtype, **kwargs)
    layer = build_layer(problem.experts, expert_format=expert_format)
    size = (slots + NUM_CARRIERS) * slot_bytes(layer.shape, dtype, form, {LAYER: layer.format})[LAYER]
    policy = Policy(100, 1.5, 1)
    made = HotSet({LAYER: layer}, layer.shape, dtype, torch.device("cpu"), size, {LAYER: pinned}, policy, form)
    made.settle()
    assert sorted(made.placement.resident(LAYER)) == sorted(pinned)
    return Case(problem, layer, made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pinned", [[1], [0, 3, 6, 7]])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_hits_and_misses_together_are_the_layer(dtype: torch.dtype, pinned: list[int], id_dtype: torch.dtype) -> None:
    made = case(pinned, dtype, id_dtype=id_dtype)
    assert_close(made.computed(), made.reference(), f"{pinned} {dtype}")


@pytest.mark.parametrize("expert_format", ["int8", "int4"])
def test_quantized_experts_are_the_same_function_on_the_device(expert_format: str) -> None:
    """In float32, where the store multiplies with the dequantized weights too."""
    made = case([0, 2, 5], torch.float32, expert_format=expert_format)
    assert_close(made.computed(), made.of_store().double(), expert_format)


@pytest.mark.parametrize("expert_format", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("at_once", [1, 2, E])
def test_what_is_held_as_published_gives_the_bits_of_the_model_s_dtype(
    expert_format: str | None, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the experts of a call are dequantized one after the other."""
    monkeypatch.setattr(slots_module, "MOST_SCRATCH_BYTES", at_once * 3 * H * INNER * dtype.itemsize)
    pinned = [7, 0, 2, 5]
    made = case(pinned, dtype, expert_format=expert_format, form="published")
    plain = case(pinned, dtype, expert_format=expert_format)
    assert made.set.use().form == "published" and plain.set.use().form == "model"
    assert torch.equal(made.computed(), plain.computed())
    few = torch.tensor([[5, -1, 3]], dtype=torch.int32).expand(T, K).contiguous()
    assert torch.equal(made.computed(ids=few), plain.computed(ids=few))
    one: dict[str, Any] = {"x": made.problem.x[:1], "ids": made.problem.ids[:1], "weights": made.problem.weights[:1]}
    assert torch.equal(made.computed(**one, decoded_tokens=1), plain.computed(**one, decoded_tokens=1))


def test_layers_of_other_formats_share_the_size_and_the_scratch() -> None:
    experts = random_problem(E, H, INNER, T, K).experts
    layers = {1: build_layer(experts, expert_format="int8"), 2: build_layer(experts, expert_format="int4")}
    sizes = slot_bytes(layers[1].shape, torch.bfloat16, "published", {1: "int8", 2: "int4_g32"})
    size = NUM_CARRIERS * sizes[1] + 2 * sizes[1] + 3 * sizes[2] + 5
    where = torch.device("cpu")
    made = HotSet(layers, layers[1].shape, torch.bfloat16, where, size, {1: [3], 2: [3, 4]}, form="published")
    made.settle()
    use = made.use()
    assert [(one.slots, one.format, one.slot_bytes) for one in use.layers] == [
        (2, "int8", sizes[1]),
        (3, "int4_g32", sizes[2]),
    ]
    assert use.size_bytes == size - 5 and use.moved_bytes == sizes[1] + 2 * sizes[2]
    held = [hot.slots.held.nbytes for hot in made.layers.values() if isinstance(hot.slots, PackedSlots)]
    assert sum(held) + NUM_CARRIERS * sizes[1] == use.size_bytes


def test_equal_placement_gives_equal_bits_in_any_batch_order() -> None:
    first, second = case([1, 4]), case([4, 1])
    assert first.hot.table[1] != second.hot.table[1]  # in other slots
    wanted = first.computed()
    assert torch.equal(first.computed(), wanted)
    assert torch.equal(second.computed(), wanted)


def test_a_token_without_hits_has_the_bits_of_the_store() -> None:
    made = case([1, 4])
    without = ~torch.isin(made.problem.ids, torch.tensor([1, 4])).any(1)
    assert 0 < without.sum() < T
    got, wanted = made.computed(), made.of_store()
    assert torch.equal(got[without], wanted[without])
    assert not torch.equal(got[~without], wanted[~without])  # the device rounds in other places


def test_a_token_with_an_adapter_has_the_bits_of_the_store() -> None:
    made = case([0, 1, 2, 3], ranks=(4, 0, 8))
    token_slots = made.problem.token_slots
    assert token_slots is not None
    adapted = token_slots >= 0
    assert 0 < adapted.sum() < T
    got, wanted = made.computed(), made.of_store()
    assert torch.equal(got[adapted], wanted[adapted]) and not torch.equal(got[~adapted], wanted[~adapted])
    assert_close(got, made.reference(), "with adapters")


def test_the_result_is_written_where_it_was_asked_for() -> None:
    made = case([1, 4])
    out = torch.empty_like(made.problem.x)
    assert made.computed(out=out) is out
    assert torch.equal(out, made.computed())


def test_both_parts_are_added_in_float32_and_rounded_once_more() -> None:
    """The cpu part is the store's result for the misses, the device's part a float32 sum."""
    made = case([1, 4])
    ids = made.problem.ids
    misses = made.of_store(ids=ids.masked_fill(torch.isin(ids, torch.tensor([1, 4])), -1))
    slot_ids = torch.from_numpy(made.hot.table[ids.clamp(0).numpy()]).masked_fill(ids < 0, -1)
    hits = torch.empty(T, H)
    hot_module.hit_sum(made.problem.x, slot_ids, made.problem.weights, made.slots, hits)
    assert torch.equal(made.computed(), (misses.float() + hits).bfloat16())


# What the store computes alone.


def test_outside_of_a_serving_step_the_store_computes_everything() -> None:
    """Training runs between two steps: it never touches the slots."""
    made = case([0, 1, 2])
    problem = made.problem
    assert not made.hot.takes(call_of(problem))
    made.slots.w13.fill_(torch.nan)
    assert torch.equal(made.of_store(), made.layer.forward(problem.x, problem.ids, problem.weights))


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(T, H)},
        {"x": torch.zeros(T, H + 1, dtype=torch.bfloat16)},
        {"x": torch.zeros(0, H, dtype=torch.bfloat16)},
        {"ids": torch.zeros(T + 1, K, dtype=torch.int32)},
        {"ids": torch.zeros(T, K)},
        {"weights": torch.zeros(T, K + 1)},
        {"token_slots": torch.zeros(T - 1, dtype=torch.int32)},
        {"slots": [None]},
    ],
)
def test_a_call_that_is_not_of_these_slots_goes_to_the_store(changed: dict[str, Any]) -> None:
    made = case([0])
    with made.set.step(decoded_tokens=T):
        assert not made.hot.takes(call_of(made.problem, **changed))


def test_long_batches_go_to_the_store() -> None:
    made, long = case([0]), torch.zeros(MOST_TOKENS + 1, H, dtype=torch.bfloat16)
    ids, weights = torch.zeros(MOST_TOKENS + 1, K, dtype=torch.int32), torch.zeros(MOST_TOKENS + 1, K)
    with made.set.step(decoded_tokens=T):
        assert not made.hot.takes(ExpertCall(long, ids, weights, (), None))
        assert made.hot.takes(ExpertCall(long[1:], ids[1:], weights[1:], (), None))


def test_with_empty_slots_the_store_computes_and_the_uses_are_counted() -> None:
    made = case([])
    assert torch.equal(made.computed(), made.of_store())
    ids = made.problem.ids
    assert (made.hot.uses.hits, made.hot.uses.misses) == (0, int((ids >= 0).sum()))
    made.set.settle()
    assert len(made.set.placement.resident(LAYER)) == 4


@pytest.mark.parametrize("bad", [-2, E, 2**30])
def test_an_id_out_of_range_is_the_stores_error_and_counts_nothing(bad: int) -> None:
    made = case([0, 1])
    ids = made.problem.ids.clone()
    ids[5, 1] = bad
    with pytest.raises(InvalidValueError, match=f"{bad}"):
        made.computed(ids=ids)
    assert (made.hot.uses.hits, made.hot.uses.misses, made.hot.uses.by_expert.sum()) == (0, 0, 0)


def test_nan_in_a_token_of_hits_alone_is_an_error_too() -> None:
    made = case([0, 1])
    x = made.problem.x.clone()
    x[3, 0] = torch.nan
    with pytest.raises(NumericsError):
        made.computed(x=x, ids=torch.zeros_like(made.problem.ids))


# Counting.


def test_decode_steps_alone_are_counted() -> None:
    made = case([1, 4])
    made.computed(decoded_tokens=0)
    assert (made.hot.uses.hits, made.hot.uses.misses, made.hot.uses.by_expert.sum()) == (0, 0, 0)
    made.computed()
    ids = made.problem.ids
    hits = int(torch.isin(ids, torch.tensor([1, 4])).sum())
    assert (made.hot.uses.hits, made.hot.uses.misses) == (hits, int((ids >= 0).sum()) - hits)
    assert made.hot.uses.by_expert.tolist() == [int((ids == e).sum()) for e in range(E)]


def test_rows_that_fill_up_a_batch_are_not_counted() -> None:
    made = case([1, 4], ranks=(4,))
    made.computed(decoded_tokens=5)
    ids, plain = made.problem.ids[:5], present(made.problem.token_slots)[:5] < 0
    assert made.hot.uses.by_expert.tolist() == [int((ids[plain] == e).sum()) for e in range(E)]
    assert made.hot.uses.hits + made.hot.uses.misses == int((ids >= 0).sum())


def test_tokens_with_adapters_are_misses_and_admit_no_expert() -> None:
    made = case([1], ranks=(4,))
    made.computed(token_slots=torch.zeros(T, dtype=torch.int32))
    assert (made.hot.uses.hits, made.hot.uses.misses) == (0, int((made.problem.ids >= 0).sum()))
    assert made.hot.uses.by_expert.sum() == 0


# The placement changes between steps.


def test_the_most_used_experts_move_in_and_hit_from_then_on() -> None:
    made = case([], slots=2)
    ids = torch.tensor([[3, 5, 3]], dtype=torch.int32).expand(T, K).contiguous()
    for _ in range(3):
        assert torch.equal(made.computed(ids=ids), made.of_store(ids=ids))
    made.set.settle()
    use = made.set.use()
    assert (use.layers[0].resident, use.moves, use.decode_steps) == ([3, 5], 2, 3)
    made.computed(ids=ids)
    assert made.hot.uses.hits == T * K


def test_nothing_moves_within_a_step() -> None:
    made = case([1, 4])
    with made.set.step(decoded_tokens=T):
        for change in (lambda: made.hot.evict(1), made.set.turn, made.set.settle):
            with pytest.raises(AssertionError, match="between two steps only"):
                change()
    assert sorted(np.flatnonzero(made.hot.table >= 0)) == [1, 4]


def test_an_expert_is_used_only_when_its_weights_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        has_come = False

        def query(self) -> bool:
            return self.has_come

        def synchronize(self) -> None:
            raise AssertionError("a turn does not wait")

    marks: list[Late] = []
    original = HotExperts.fill

    def late(*args: Any) -> Late:
        original(*args)
        marks.append(Late())
        return marks[-1]

    monkeypatch.setattr(HotExperts, "fill", late)
    made = case([])
    made.set.placement.count(LAYER, np.eye(E, dtype=np.int64)[6] * 9)
    for _ in range(3):
        made.set.turn()
    assert len(marks) == 1 and made.set.is_moving() and made.hot.table[6] == -1
    with pytest.raises(AssertionError, match="have not arrived"):
        made.hot.admit(6, 0, marks[0])
    marks[0].has_come = True
    made.set.turn()
    assert made.hot.table[6] >= 0 and not made.set.is_moving()


def test_a_slot_that_is_in_use_is_not_filled() -> None:
    made = case([1])
    with pytest.raises(AssertionError, match="is in use"):
        made.hot.fill(int(made.hot.table[1]), torch.zeros(made.slots.expert_bytes, dtype=torch.uint8))


def test_a_turn_moves_as_many_bytes_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case([])
    made.set.placement.count(LAYER, np.full(E, 50))
    made.set.turn()
    assert made.set.use().moves == NUM_CARRIERS
    made = case([])
    monkeypatch.setattr(hot_set, "MOST_BYTES_PER_TURN", expert_bytes(made.layer.shape, torch.bfloat16) * 3 // 2)
    made.set.placement.count(LAYER, np.full(E, 50))
    made.set.turn()
    assert made.set.use().moves == 1


def test_the_size_holds_slots_and_buffers() -> None:
    problem = random_problem(E, H, INNER, 1, 1)
    layer = build_layer(problem.experts)
    each = 3 * H * INNER * 2
    for size in (3 * each, 7 * each + 5, 40 * each):
        made = HotSet({0: layer, 1: layer}, layer.shape, torch.bfloat16, torch.device("cpu"), size)
        slots = [hot.slots for hot in made.layers.values()]
        held = [t.nbytes for one in slots if isinstance(one, PlainSlots) for t in (one.w13, one.w2)]
        held += [carrier.buffer.nbytes for carrier in made._carriers]
        assert sum(held) == made.size_bytes <= size
    with pytest.raises(InvalidValueError, match=f"--gpu-experts {3 * each - 1}: has no room.*allowed: {3 * each}"):
        HotSet({0: layer}, layer.shape, torch.bfloat16, torch.device("cpu"), 3 * each - 1)
    with pytest.raises(InvalidValueError, match="4 experts are pinned to the device, which has room for 1"):
        HotSet({0: layer}, layer.shape, torch.bfloat16, torch.device("cpu"), 3 * each, {0: [0, 1, 2, 3]})


# Planted faults: each must be seen by the comparison with float64.


def _added_twice(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hot_module.hit_sum

    def doubled(*args: Any) -> None:
        original(*args)
        args[-1].mul_(2)

    monkeypatch.setattr(hot_module, "hit_sum", doubled)


def _computed_on_both(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HotExperts, "hits", lambda self, ids, token_slots: np.zeros(ids.shape, bool))


def _computed_on_none(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made.hot._device_table.fill_(-1)


def _wrong_slot(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made.hot._device_table[[1, 4]] = made.hot._device_table[[4, 1]]


def _half_copied(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made.slots.w2.view(-1)[: made.slots.w2.numel() // 2] = 0


def _adapters_left_out(made: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = HotExperts.hits
    monkeypatch.setattr(HotExperts, "hits", lambda self, ids, token_slots: hits(self, ids, None))


@pytest.mark.parametrize(
    "plant",
    [_added_twice, _computed_on_both, _computed_on_none, _wrong_slot, _half_copied, _adapters_left_out],
)
def test_a_planted_fault_is_found(
    plant: Callable[[Case, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = case([1, 4], ranks=(4,))
    assert_close(made.computed(), made.reference(), "without the fault")
    plant(made, monkeypatch)
    with pytest.raises(AssertionError, match="with the fault"):
        assert_close(made.computed(), made.reference(), "with the fault")
