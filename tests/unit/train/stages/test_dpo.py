"""Preference steps: what the reference is, that it is computed once, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.resident.counting_resident import CountingResident

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.examples import Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.stages.dpo import Dpo, described_reference, preference_loss, reference_adapter
from kt_runtime.wire import LoraSettings


@pytest.fixture
def make(resident: CountingResident, make_recipe: Callable[..., Recipe], pairs: list[Any]) -> Any:
    def dpo(**keys: Any) -> Dpo:
        resident.sessions.clear()
        resident.create_session("s", LoraSettings(rank=2, alpha=4))
        resident.log.clear()
        return Dpo(resident, "s", make_recipe(stage="dpo", **keys), pairs, "retain")

    return dpo


def sent(resident: CountingResident, what: str) -> list[Any]:
    return [entry for entry in resident.log if entry[0] == what]


def test_the_reference_is_summed_over_counted_tokens_and_computed_once(
    make: Any, resident: CountingResident, pairs: list[Pair]
) -> None:
    dpo = make()
    first = dpo.accumulate([pairs[:2], pairs[2:3]])
    again = dpo.accumulate([pairs[1:3], pairs[:1]])
    forwards, backwards = sent(resident, "forward"), sent(resident, "forward_backward")
    assert [entry[3] for entry in forwards] == ["reference"] and len(backwards) == 2
    expected = {}
    for pair in pairs[:3]:
        for example in pair.examples:
            logprobs = -(example.targets % 7 + 1).astype(np.float32) * np.float32(0.1)
            expected[id(example)] = np.float32(np.sum(logprobs[example.trained], dtype=np.float64))
    wanted = [pairs[:3], [pairs[1], pairs[2], pairs[0]]]
    for (_, batch, loss, reference, activations), chosen in zip(backwards, wanted, strict=True):
        assert reference.dtype == np.float32 and activations == "retain"
        assert reference.tolist() == [expected[id(example)] for pair in chosen for example in pair.examples]
        assert loss == preference_loss(dpo._recipe, 1 / 3) and len(batch.lengths) == 2 * len(chosen)
    assert first.num_samples == again.num_samples == 3
    assert first.metrics == {"rewards/accuracies": 0.5, "rewards/margins": 1.0}


def test_evaluation_pairs_have_a_reference_too_and_a_checkpoint_knows_the_training_pairs(
    make: Any, resident: CountingResident, pairs: Any
) -> None:
    dpo = make()
    dpo.accumulate([pairs[:2]])
    held_out = [type(pairs[0])(pair.rejected, pair.chosen) for pair in pairs]
    totals = dpo.evaluate(held_out, 4, lambda: False)
    assert totals.count == 6 and totals.metrics["rewards/margins"] == 6.0
    assert dpo.evaluate(held_out, 4, lambda: False).loss == totals.loss
    assert [entry[3] for entry in sent(resident, "forward")].count("reference") == 1 + 2
    saved = dpo.state()["reference"]
    assert saved.shape == (6, 2) and np.isnan(saved[2:]).all() and not np.isnan(saved[:2]).any()
    resumed = make()
    resumed.restore({"reference": saved})
    resumed.accumulate([pairs[:2]])
    assert sent(resident, "forward") == []
    with pytest.raises(InvalidValueError, match=r"float32 \[3, 2\]"):
        make().restore({"reference": saved[:3]})


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_losses_without_a_reference_ask_for_none(
    make: Any, resident: CountingResident, pairs: list[Pair], kind: str
) -> None:
    dpo = make(pref_loss=kind)
    dpo.accumulate([pairs[:2]])
    assert sent(resident, "forward") == [] and sent(resident, "forward_backward")[0][3] is None and dpo.state() == {}


def test_which_reference_is_said(make_recipe: Callable[..., Recipe]) -> None:
    for keys, path, words in (
        ({}, None, "the base model"),
        ({"adapter_name_or_path": Path("a")}, Path("a"), "the starting adapter a"),
        ({"adapter_name_or_path": Path("a"), "ref_model_adapters": Path("b")}, Path("b"), "the adapter b"),
        ({"adapter_name_or_path": Path("a"), "pref_loss": "simpo"}, None, "none; simpo"),
    ):
        recipe = make_recipe(stage="dpo", **keys)
        assert reference_adapter(recipe) == path and words in described_reference(recipe)
    assert reference_adapter(make_recipe(stage="sft", adapter_name_or_path=Path("a"))) is None


def test_the_loss_carries_only_what_its_kind_knows(make_recipe: Callable[..., Recipe]) -> None:
    simpo = preference_loss(make_recipe(stage="dpo", pref_loss="simpo", simpo_gamma=0.7, pref_ftx=0.2), 0.5)
    assert (simpo.gamma, simpo.label_smoothing, simpo.ftx, simpo.scale) == (0.7, 0.0, 0.2, 0.5)
    assert preference_loss(make_recipe(stage="dpo", dpo_label_smoothing=0.1)).label_smoothing == 0.1
