"""The bits of training do not depend on how the work was cut into slices, however small the budgets of turns are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.cases import choose
from reference.resident.configs import FAMILIES

from kt_runtime.resident.pacing.budget import TurnBudget
from kt_runtime.resident.scheduler import Slice, Slices, TrainingScheduler, Work
from kt_runtime.resident.training.call import CallResult
from kt_runtime.resident.training.optimizer import StepSettings
from kt_runtime.wire.messages import CrossEntropy, PreferenceLoss

TOKENS = 400


def cut(slices: Slices, choose: Callable[[Slice], int | None]) -> tuple[Any, int]:
    """Runs a work; `choose` cuts each slice that can be cut. Returns the work's result and the number of slices."""
    granted, count = None, 0
    while True:
        try:
            upcoming = slices.send(granted)
        except StopIteration as stop:
            return stop.value, count
        assert isinstance(upcoming, Slice)
        granted, count = choose(upcoming) if upcoming.least else None, count + 1


def least(upcoming: Slice) -> int:
    return min(upcoming.least, upcoming.size)


def anyhow(seed: int) -> Callable[[Slice], int | None]:
    chance = random.Random(seed)

    def choose(upcoming: Slice) -> int | None:
        largest = upcoming.size // upcoming.least
        return chance.choice([None, upcoming.size, upcoming.least * chance.randint(1, max(1, largest))])

    return choose


def computed(
    lab: Any, batch: Any, choose: Callable[[Slice], int | None], **options: Any
) -> tuple[CallResult, Any, int]:
    """The result, the parameters after a step, and the number of slices."""
    session = lab.session(options.pop("targets", ("all",)))
    loss = options.pop("loss", CrossEntropy())
    result, count = cut(session.forward_backward(batch, loss, TOKENS, **options), choose)
    again, _ = cut(session.forward(batch, loss, TOKENS), choose)
    assert torch.equal(result.logprobs, again.logprobs)
    gradient = {name: value.clone() for name, value in session.gradient.items()}
    cut(session.optim_step(StepSettings(1e-2, max_grad_norm=1.0)), choose)
    return result, {"gradient": gradient, "parameters": dict(session.parameters)}, count


def assert_equal(one: tuple[CallResult, Any, int], other: tuple[CallResult, Any, int]) -> None:
    assert one[0].loss == other[0].loss
    assert torch.equal(one[0].logprobs, other[0].logprobs)
    for kind in ("gradient", "parameters"):
        assert one[1][kind].keys() == other[1][kind].keys()
        differ = [name for name, value in one[1][kind].items() if not torch.equal(value, other[1][kind][name])]
        assert not differ, f"{len(differ)} of {len(one[1][kind])} differ: {differ[:6]}"


def whole(upcoming: Slice) -> int | None:
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_masters_are_those_of_whole_slices(
    make_lab: Any, make_batch: Any, family: str, dtype: torch.dtype
) -> None:
    lab = make_lab(family, dtype=dtype)
    batch = make_batch(70, 33, 66, 1, 70)
    expected = computed(lab, batch, whole)
    parts = computed(lab, batch, least)
    assert parts[2] > 3 * expected[2]
    assert_equal(parts, expected)
    for seed in range(choose(few=1, usual=3, every=3)):
        assert_equal(computed(lab, batch, anyhow(seed)), expected)


@pytest.mark.slow
def test_they_are_so_for_every_further_family(further_lab: Any, make_batch: Any) -> None:
    """Where attention is not in float32, as beside a GPU, nothing is cut."""
    batch = make_batch(40, 33, 1)
    expected, parts = computed(further_lab, batch, whole), computed(further_lab, batch, least)
    assert_equal(parts, expected)
    assert (parts[2] > expected[2]) == further_lab.twin.computes_tokens_alone


@pytest.mark.slow
@pytest.mark.parametrize("targets", [("attention",), ("experts",)])
def test_they_are_so_for_a_part_of_the_targets(make_lab: Any, make_batch: Any, targets: tuple[str, ...]) -> None:
    lab, batch = make_lab("qwen3_moe"), make_batch(70, 33, 66)
    assert_equal(computed(lab, batch, least, targets=targets), computed(lab, batch, whole, targets=targets))


@pytest.mark.slow
def test_what_was_retained_is_given_up_by_a_cut_without_other_bits(make_lab: Any, make_batch: Any) -> None:
    lab, batch = make_lab("qwen3_moe"), make_batch(70, 33, 66)
    expected = computed(lab, batch, whole, activations="retain")
    for seed in range(choose(few=2, usual=4, every=4)):
        assert_equal(computed(lab, batch, anyhow(seed), activations="retain"), expected)


@pytest.mark.slow
def test_pairs_that_share_a_prompt_are_cut_too(make_lab: Any, make_pairs: Any) -> None:
    loss = PreferenceLoss(kind="orpo", beta=0.1)
    for family in ("qwen3_moe", "deepseek_v3"):
        lab, batch = make_lab(family), make_pairs((20, 9, 14), (5, 30, 3), (12, 12, 12))
        expected = computed(lab, batch, whole, loss=loss)
        assert_equal(computed(lab, batch, least, loss=loss), expected)
        assert_equal(computed(lab, batch, anyhow(5), loss=loss), expected)


def test_a_layer_with_dropout_is_not_cut(make_lab: Any, make_batch: Any) -> None:
    session = make_lab("qwen3_moe").session(dropout=0.1)
    _, slices = cut(session.forward_backward(make_batch(70, 33), CrossEntropy(), TOKENS), least)
    other = make_lab("qwen3_moe").session(dropout=0.1)
    assert slices == cut(other.forward_backward(make_batch(70, 33), CrossEntropy(), TOKENS), whole)[1]


def test_the_schedulers_own_cuts_change_no_bit(make_lab: Any, make_batch: Any) -> None:
    """Turns of every budget, by the real clock: what is cut then depends on this machine's speed."""
    lab, batch = make_lab("qwen3_moe"), make_batch(70, 33, 66, 1, 70)
    expected = computed(lab, batch, whole)
    for seconds in (1e-5, 1e-3, 1.0):
        session = lab.session()
        results: list[Any] = []
        scheduler = TrainingScheduler(1.0)
        work = session.forward_backward(batch, CrossEntropy(), TOKENS)
        scheduler.submit(Work("s", work, results.append, results.append, Slice("opening")))
        while not scheduler.is_idle:
            scheduler.run(scheduler.plan(False, TurnBudget(seconds, cuts=True)), is_serving=False)
        (result,) = results
        assert result.loss == expected[0].loss and torch.equal(result.logprobs, expected[0].logprobs)
        assert all(torch.equal(value, session.gradient[name]) for name, value in expected[1]["gradient"].items())
        assert scheduler.parts_run > 0 or seconds == 1.0


INDEXERS = ["glm_moe_dsa", "deepseek_v32"]


@pytest.mark.slow
@pytest.mark.parametrize("family", choose(few=INDEXERS[:1], usual=INDEXERS, every=INDEXERS))
def test_cut_layers_choose_the_keys_of_uncut_ones(
    family: str, make_further_host: Callable[..., Any], lab_of: Callable[..., Any], batch: Any
) -> None:
    """Also where layers share an indexer, and a cut gives them the choice of some rows at a time."""
    expected, values, _ = computed(lab_of(make_further_host(family)), batch, lambda _: None)
    for cut in (least, anyhow(1)):
        found, again, _ = computed(lab_of(make_further_host(family)), batch, cut)
        assert torch.equal(found.logprobs, expected.logprobs) and found.loss == expected.loss
        for kind, tensors in values.items():
            assert all(torch.equal(again[kind][name], tensor) for name, tensor in tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", choose(few=INDEXERS[:1], usual=INDEXERS, every=INDEXERS))
def test_with_dropout_keys_and_values_of_each_head_are_those_of_the_same_choice(
    family: str, make_further_host: Callable[..., Any], lab_of: Callable[..., Any], batch: Any
) -> None:
    """Dropout on kv_b_proj's input needs keys and values for each head. So rare a dropout drops nothing here."""
    lab = lab_of(make_further_host(family))
    expected = lab.forward(lab.session(), batch)
    session = lab.session(dropout=1e-9)
    found = lab.forward_backward(session, batch)
    assert session.gradient and found.loss == pytest.approx(expected.loss, rel=5e-8)  # 5.6e-9 measured
