"""Hot experts on a device: hits there and misses in the store are the layer, also while experts move.

Bodies of tests: a folder for a device imports them. Its conftest has the fixtures `device` and `expert_tolerance`: how
near to float64 that device computes experts.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, assert_within, present, random_problem
from reference.quantized import SCHEMES, write_checkpoint
from torch import Tensor
from unit.experts.quantized import test_gguf_layers

from kt_runtime import device as devices
from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore, LoraSlot
from kt_runtime.experts.gpu.hot import packed, slots
from kt_runtime.experts.gpu.hot.layer import HotExperts
from kt_runtime.experts.gpu.hot.placement import Policy
from kt_runtime.experts.gpu.hot.set import NUM_CARRIERS, HotSet
from kt_runtime.experts.gpu.hot.slots import Form, PackedSlots, PlainSlots, Scratch, slot_bytes
from kt_runtime.experts.gpu.routed_mlp import has_grouped_products

E, H, INNER, T, K = 8, 96, 48, 6, 3
LAYER, SLOTS = 2, 3


GGUF = ("MXFP4", "Q5_0", "Q4_K_M", "Q5_K")
FLOAT32 = 4e-7  # of a row's largest weight; 5.8e-8 measured
FORMS: tuple[Form, ...] = ("model", "published")
each_form = pytest.mark.parametrize("form", FORMS)

Tolerance = Callable[[torch.dtype, int], float]
"""Of the norm of a result, by its dtype and the number of terms of the sums that it goes through."""


class Served:
    """A layer in the store, and slots on a device for some of its experts. In fp8 where slots hold what is published:
    the store multiplies bf16 activations with it, as the device does."""

    def __init__(
        self, where: torch.device, pinned: list[int], dtype: torch.dtype = torch.bfloat16, form: Form = "model"
    ) -> None:
        self.where, self.dtype = where, dtype
        self.layer, self.experts = built("fp8" if form == "published" else "bf16")
        each = slot_bytes(self.layer.shape, dtype, form, {LAYER: self.layer.format})[LAYER]
        self.set = HotSet(
            {LAYER: self.layer},
            self.layer.shape,
            dtype,
            where,
            (SLOTS + NUM_CARRIERS) * each,
            {LAYER: pinned},
            Policy(4, 1.2, 1),
            form,
        )
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


def built(
    kind: str, num_experts: int = E, hidden: int = H, inner: int = INNER
) -> tuple[ExpertLayer, moe.ReferenceExperts]:
    """A layer from a checkpoint of a scheme of `reference.quantized`, or from a GGUF file, and its exact weights."""
    experts, shape = moe.random_experts(num_experts, hidden, inner, seed=7), ExpertShape(num_experts, hidden, inner)
    with tempfile.TemporaryDirectory(prefix="kt-experts-") as name:
        directory = Path(name)
        if kind in SCHEMES:
            prefix, exact = "m", write_checkpoint(directory, {"m": experts}, kind)["m"]
        else:
            prefix, exact = "blk.0", test_gguf_layers.write(directory, experts, test_gguf_layers.KINDS[kind])
        store = ExpertStore.load(directory, {0: prefix}, shape, num_threads=2, num_nodes=2)
    return store.layers[0], exact


built_once = functools.cache(built)
"""For tests that only read the layer: each schedule of the emulated device has the same one."""


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


def check(got: Tensor, problem: Problem, tolerance: Tolerance, what: str) -> None:
    """`got` is the layer's result, as the reference computes it in float64."""
    slots = [None if slot is None else (slot.tensors(), slot.scaling) for slot in problem.slots]
    arguments = (problem.experts, problem.x, problem.ids, problem.weights)
    wanted = moe.routed_experts(*arguments, slots=slots, token_slots=problem.token_slots)
    assert_within(got.cpu(), wanted, tolerance(got.dtype, H + INNER), what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_form
def test_hits_and_misses_together_are_the_layer(
    device: torch.device, expert_tolerance: Tolerance, dtype: torch.dtype, form: Form
) -> None:
    served = Served(device, [1, 4, 6], dtype, form)
    problem = served.problem(seed=1)
    got = served.computed(problem)
    assert served.hot.uses.hits > 0 and served.hot.uses.misses > 0
    check(got, problem, expert_tolerance, f"{dtype} on {device}")


@each_form
def test_equal_placement_gives_equal_bits(device: torch.device, form: Form) -> None:
    first, second = Served(device, [1, 4], form=form), Served(device, [4, 1], form=form)
    problem = first.problem(seed=2)
    wanted = first.computed(problem).cpu()
    assert first.hot.table[1] != second.hot.table[1]  # in other slots
    assert torch.equal(second.computed(problem).cpu(), wanted) and torch.equal(first.computed(problem).cpu(), wanted)


@each_form
def test_tokens_without_hits_or_with_adapters_have_the_bits_of_the_store(
    device: torch.device, expert_tolerance: Tolerance, form: Form
) -> None:
    served = Served(device, [1, 4, 6], form=form)
    problem = served.problem(seed=3, ranks=(4, 8))
    adapted = present(problem.token_slots) >= 0
    hits = torch.isin(problem.ids, torch.tensor([1, 4, 6])).any(1) & ~adapted
    got, wanted = served.computed(problem).cpu(), served.of_store(problem)
    assert adapted.any() and hits.any()
    assert torch.equal(got[~hits], wanted[~hits]) and not torch.equal(got[hits], wanted[hits])
    check(got, problem, expert_tolerance, "with adapters")


def test_outside_of_a_step_the_store_computes_everything(device: torch.device) -> None:
    """As training does. What the slots hold does not matter."""
    served = Served(device, [1, 4, 6])
    problem = served.problem(seed=4)
    assert isinstance(served.hot.slots, PlainSlots)
    served.hot.slots.w13.fill_(torch.nan)
    got = served.layer.forward(**_moved(device, problem))
    assert torch.equal(got.cpu(), served.of_store(problem))


@each_form
def test_experts_that_move_change_no_step_before_or_after(
    device: torch.device, expert_tolerance: Tolerance, form: Form
) -> None:
    """Steps and moves are queued one after the other, and nobody waits for a result before the end."""
    served = Served(device, [], form=form)
    got, problems, residents = [], [], set()
    for step in range(24):
        problem = served.problem(seed=100 + step)
        # Other experts are used every few steps, so that there is nearly always one on its way.
        problem.ids = torch.where(problem.ids < 0, -1, (problem.ids % 4 + 2 * (step // 6)) % E)
        got.append(served.computed(problem))
        problems.append(problem)
        served.set.turn()
        residents.add(tuple(sorted(served.set.placement.resident(LAYER))))
    for step, (one, problem) in enumerate(zip(got, problems, strict=True)):
        check(one, problem, expert_tolerance, f"step {step}")
    use = served.set.use()
    assert use.moves > SLOTS and len(residents) > 2 and use.layers[0].hits > T


@each_form
def test_a_slot_is_filled_after_the_steps_that_read_it(
    device: torch.device, expert_tolerance: Tolerance, form: Form
) -> None:
    """All three experts of a step that nobody has waited for leave at once, and the copies of others are awaited."""
    served = Served(device, [], form=form)
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
        check(got, problem, expert_tolerance, f"after {residents} have left")


@each_form
def test_streams_that_alternate_see_each_other_s_tables(
    device: torch.device, expert_tolerance: Tolerance, form: Form
) -> None:
    """SGLang's passes come on one stream with graphs, and on another without."""
    served = Served(device, [1, 4], form=form)
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
        check(one, problem, expert_tolerance, "on a stream of its own")


@each_form
def test_a_call_that_fails_leaves_the_next_one_right(
    device: torch.device, expert_tolerance: Tolerance, form: Form
) -> None:
    served = Served(device, [1, 4], form=form)
    good, bad, wrong = served.problem(seed=5), served.problem(seed=6), served.problem(seed=7)
    bad.x[2, 3] = torch.nan
    wrong.ids[1, 1] = E
    with pytest.raises(NumericsError):
        served.computed(bad)
    with pytest.raises(InvalidValueError):
        served.computed(wrong)
    assert served.hot.uses.hits + served.hot.uses.misses == 0
    check(served.computed(good), good, expert_tolerance, "after failures")


@pytest.mark.parametrize("kind", ["fp8", "fp8_channel", "int8", "int4_g32", "int4_g32_zp", "int8_g128_zp", *GGUF])
def test_what_is_published_is_dequantized_to_the_store_s_bits(device: torch.device, kind: str) -> None:
    check_dequantized(device, kind, hidden=256, inner=256)


def check_dequantized(device: torch.device, kind: str, hidden: int, inner: int) -> None:
    """Of slots in any order, some of a matrix's blocks at once. In float32 within roundings of the exact weights, which
    are `kind`'s: a name of `reference.quantized`, or of GGUF."""
    layer, exact = built_once(kind, 3, hidden, inner)
    bits = torch.empty(3, 2 * inner, hidden).bfloat16(), torch.empty(3, hidden, inner).bfloat16()
    layer.unpack_range(0, 3, *bits)
    values = torch.cat([exact.gate, exact.up], dim=1), exact.down
    experts = torch.tensor([2, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "MOST_WEIGHTS_AT_ONCE", 3 * 2 * 16 * hidden)
        for dtype in (torch.bfloat16, torch.float32):
            made = PackedSlots(layer.shape, 3, layer.format, Scratch(layer.shape, dtype, device))
            for slot in range(3):
                buffer = devices.pinned(made.expert_bytes)
                made.carry(layer, 2 - slot, buffer)
                made.fill(slot, buffer)
            got = [tensor.cpu() for tensor in made.weights((2 - experts).to(device))]
            for found, rounded, value in zip(got, bits, values, strict=True):
                assert torch.equal(found.bfloat16(), rounded[experts])
                largest = value[experts].abs().amax(-1, keepdim=True)
                error = ((found.double() - value[experts]).abs() / largest).max().item()
                print(f"{kind} {dtype}: {error:.3g}")
                assert error <= (2**-8 if dtype == torch.bfloat16 else FLOAT32), f"{kind} {dtype}: {error:.3g}"


def test_experts_in_turn_through_a_scratch_are_those_at_once(device: torch.device, expert_tolerance: Tolerance) -> None:
    """A scratch of one expert: the device computes the hits expert by expert. The bits are the same, but where the
    device multiplies groups, which may have another order of sums for another number of them."""
    served = Served(device, [1, 4, 6], form="published")
    problem = served.problem(seed=9)
    wanted = served.computed(problem).cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "MOST_SCRATCH_BYTES", 1)
        small = Served(device, [1, 4, 6], form="published")
    assert isinstance(small.hot.slots, PackedSlots) and small.hot.slots.at_once == 1
    got = small.computed(problem).cpu()
    check(got, problem, expert_tolerance, "in turn")
    assert has_grouped_products(device, small.dtype, H, INNER) or torch.equal(got, wanted)


def run_all(where: torch.device, tolerance: Tolerance, form: Form) -> None:
    """Every body; for tests that plant a fault."""
    for dtype in (torch.float32, torch.bfloat16):
        test_hits_and_misses_together_are_the_layer(where, tolerance, dtype, form)
    test_equal_placement_gives_equal_bits(where, form)
    test_tokens_without_hits_or_with_adapters_have_the_bits_of_the_store(where, tolerance, form)
    test_outside_of_a_step_the_store_computes_everything(where)
    test_experts_that_move_change_no_step_before_or_after(where, tolerance, form)
    test_a_slot_is_filled_after_the_steps_that_read_it(where, tolerance, form)
    test_streams_that_alternate_see_each_other_s_tables(where, tolerance, form)
    test_a_call_that_fails_leaves_the_next_one_right(where, tolerance, form)
    test_experts_in_turn_through_a_scratch_are_those_at_once(where, tolerance)


def one_layer(where: torch.device, form: Form) -> tuple[ExpertLayer, HotSet, dict[str, Any]]:
    """A layer with hot experts and a call on the device, for tests of what a call waits for."""
    served = Served(where, [1, 4], form=form)
    return served.layer, served.set, _moved(where, served.problem(seed=8))
