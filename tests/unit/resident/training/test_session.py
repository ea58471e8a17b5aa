"""A session's reference: a second adapter that computes and is never trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear
from reference.lora import merge, random_adapter

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.wire.messages import PreferenceLoss

DPO = PreferenceLoss(kind="sigmoid", beta=0.5)


def add_reference(lab: Any, session: Any, adapter: AdapterTensors) -> None:
    own = {name: LoraPair(pair.a.detach().clone(), pair.b.detach().clone()) for name, pair in adapter.modules.items()}
    modules = lab.twin.family.lora_modules(lab.host.config)
    run_at_once(session.add_reference(replace(adapter, modules=own), modules))


@pytest.mark.parametrize("only", [(), ("attention",), ("up_proj", "q_a_proj")], ids=["all", "attention", "two"])
def test_the_reference_is_the_base_with_its_adapter(deepseek_lab: Any, batch: Any, only: tuple[str, ...]) -> None:
    """Of another rank, scaling and targets than the session's own."""
    session = deepseek_lab.session(["attention"])
    adapter = random_adapter(deepseek_lab.host.config, rank=7, alpha=3.0, seed=5, only=only)
    add_reference(deepseek_lab, session, adapter)
    found = deepseek_lab.forward(session, batch, model="reference")
    plain = merge(copy.deepcopy(deepseek_lab.host.hf), adapter)
    expected, ends = [], np.cumsum(batch.lengths)[:-1]
    for tokens, targets in zip(np.split(batch.tokens, ends), np.split(batch.targets, ends), strict=True):
        logits = plain(torch.from_numpy(tokens.astype("int64"))[None]).logits[0]
        expected.append(logits.log_softmax(-1).gather(1, torch.from_numpy(targets.astype("int64"))[:, None])[:, 0])
    assert torch.allclose(found.logprobs, torch.cat(expected).detach(), rtol=0, atol=1.4e-5)  # 1.4e-6; 1.9e-6 portably
    assert (found.logprobs - deepseek_lab.forward(session, batch, model="base").logprobs).abs().max() > 1e-2


def test_without_an_adapter_the_reference_is_the_base(deepseek_lab: Any, batch: Any) -> None:
    session = deepseek_lab.session()
    base, reference = (deepseek_lab.forward(session, batch, model=model) for model in ("base", "reference"))
    assert torch.equal(base.logprobs, reference.logprobs)


def summed(logprobs: torch.Tensor, batch: Any) -> np.ndarray:
    """What a trainer sends as `reference`."""
    parts = zip(logprobs.split(batch.lengths), torch.from_numpy(batch.weights).split(batch.lengths), strict=True)
    return np.array([values[weights != 0].double().sum() for values, weights in parts], np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fresh_adapter_begins_as_its_reference(make_lab: Any, pairs: Any, dtype: torch.dtype) -> None:
    """The first loss of DPO is log 2, and no pair is right yet."""
    lab = make_lab(dtype=dtype)
    session = lab.session(fill=False)
    reference = summed(lab.forward(session, pairs, loss=DPO, model="reference").logprobs, pairs)
    first = lab.forward_backward(session, pairs, loss=DPO, reference=reference)
    assert first.loss == pytest.approx(len(pairs.lengths) / 2 * np.log(2), rel=5e-6)  # 5.7e-7 measured
    assert first.metrics["rewards/margins"] == pytest.approx(0, abs=2e-5)  # 2.4e-6 measured
    assert any(value.any() for value in session.gradient.values())


@pytest.mark.slow
def test_the_reference_stays_as_it_is_while_the_policy_trains(deepseek_lab: Any, pairs: Any) -> None:
    """The policy begins as the reference, and leaves it: DPO that continues from an adapter."""
    session = deepseek_lab.session()
    adapter = AdapterTensors.from_modules(
        session.settings.rank,
        session.settings.alpha,
        {m.name: tuple(session.parameters[f"{m.name}.lora_{x}"] for x in "AB") for m in session.modules},
    )
    add_reference(deepseek_lab, session, adapter)
    base = deepseek_lab.forward(session, pairs, model="base").logprobs
    first = deepseek_lab.forward(session, pairs, loss=DPO, model="reference")
    assert first.loss == len(pairs.lengths) / 2 * np.log(2)
    assert torch.equal(first.logprobs, deepseek_lab.forward(session, pairs, loss=DPO, reference=None).logprobs)
    reference = summed(first.logprobs, pairs)
    losses = []
    for _ in range(3):
        losses.append(deepseek_lab.forward_backward(session, pairs, loss=DPO, reference=reference).loss)
        deepseek_lab.step(session)
    assert losses[0] == pytest.approx(first.loss, rel=2.2e-6)  # 2.3e-7 measured, 3.5e-7 portably
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(deepseek_lab.forward(session, pairs, loss=DPO, model="reference").logprobs, first.logprobs)
    assert torch.equal(deepseek_lab.forward(session, pairs, model="base").logprobs, base)
    assert not any("reference" in name for name in session.gradient)


@pytest.mark.slow
def test_training_is_the_same_with_a_reference_beside_it_bit_for_bit(make_lab: Any, make_batch: Any) -> None:
    def losses(with_reference: bool) -> list[float]:
        lab = make_lab()
        session = lab.session()
        if with_reference:
            add_reference(lab, session, random_adapter(lab.host.config, rank=2, alpha=3.0, seed=5))
        found = []
        for step in range(2):
            found.append(lab.forward_backward(session, make_batch(20, 9, seed=step)).loss)
            lab.step(session)
        return found

    assert losses(True) == losses(False)


def test_closing_takes_the_reference_away_too(deepseek_lab: Any) -> None:
    session = deepseek_lab.session(["attention"])
    add_reference(deepseek_lab, session, random_adapter(deepseek_lab.host.config, rank=2, alpha=3.0, seed=5))
    session.close()
    assert not any(isinstance(module, PeftLinear) for module in deepseek_lab.twin._model.modules())
    assert not any(experts.adapters for experts in deepseek_lab.twin.experts.values())


def test_a_reference_for_another_model_is_refused(deepseek_lab: Any) -> None:
    session = deepseek_lab.session(["attention"])
    pair = (torch.zeros(2, 4), torch.zeros(4, 2))
    with pytest.raises(InvalidValueError, match=r"adapts 'model\.layers\.0\.elsewhere', which the model does not have"):
        add_reference(deepseek_lab, session, AdapterTensors.from_modules(2, 2.0, {"model.layers.0.elsewhere": pair}))
