"""Losses end to end, against autograd through the plain Hugging Face model, each sequence computed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference.cases import choose
from reference.trl_dpo import dpo_loss
from torch.nn.functional import logsigmoid

from kt_runtime.resident.training import losses
from kt_runtime.resident.training.loss_slices import _is_argmax
from kt_runtime.wire.messages import PreferenceLoss

REFERENCE = np.array([-30.5, -60.25, -40.0, -12.0, -6.5, -38.0], np.float32)
KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.1},
    "smoothed": {"kind": "sigmoid", "beta": 0.2, "label_smoothing": 0.1, "ftx": 0.5, "scale": 0.25},
    "hinge": {"beta": 0.1},
    "ipo": {"beta": 0.4},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "gamma": 0.5},
}


def settings(name: str) -> PreferenceLoss:
    return PreferenceLoss(**{"kind": name} | KINDS[name])


def options(loss: PreferenceLoss) -> dict[str, Any]:
    return {"reference": REFERENCE} if loss.has_reference else {}


def plain_logprobs(logits: list[torch.Tensor], batch: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of each sequence the targets' log-probabilities in float64, and which of them count."""
    ends = np.cumsum(batch.lengths)[:-1]
    targets = [torch.from_numpy(part.astype("int64")) for part in np.split(batch.targets, ends)]
    counted = [torch.from_numpy(part != 0) for part in np.split(batch.weights, ends)]
    everything = [of_sequence.log_softmax(-1).double() for of_sequence in logits]
    return [x.gather(1, t[:, None])[:, 0] for x, t in zip(everything, targets, strict=True)], counted


def plain_preference(loss: PreferenceLoss, logprobs: list[torch.Tensor], counted: list[torch.Tensor]) -> torch.Tensor:
    """TRL's code where it is right, else the papers' formulas as plainly as they can be written."""
    sums = torch.stack([values[mask].sum() for values, mask in zip(logprobs, counted, strict=True)])
    means = sums / torch.tensor([int(mask.sum()) for mask in counted])
    if loss.kind in ("hinge", "ipo") or (loss.kind == "sigmoid" and not loss.label_smoothing):
        value = dpo_loss(logprobs, counted, REFERENCE, loss.kind, loss.beta) * len(sums) / 2
    elif loss.kind == "sigmoid":
        ratios = sums - torch.from_numpy(REFERENCE)
        margin = loss.beta * (ratios[0::2] - ratios[1::2])
        smoothing = loss.label_smoothing
        value = -((1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)).sum()
    elif loss.kind == "orpo":
        odds = means.exp() / (1 - means.exp())
        value = (-means[0::2] - loss.beta * logsigmoid(torch.log(odds[0::2] / odds[1::2]))).sum()
    else:
        value = -logsigmoid(loss.beta * (means[0::2] - means[1::2]) - loss.gamma).sum()
    return loss.scale * (value - loss.ftx * means[0::2].sum())


def check_against_plain(lab: Any, batch: Any, loss: PreferenceLoss, max_tokens: int) -> Any:
    session = lab.session()
    result = lab.forward_backward(session, batch, max_tokens, loss, **options(loss))
    values = {name: value.detach().clone().requires_grad_() for name, value in session.parameters.items()}
    expected = plain_preference(loss, *plain_logprobs(lab.plain_logits(session, values, batch), batch))
    expected.backward()
    # Measured with AMX and portably: 7e-8 and 2.4e-7. The loss of simpo is a small difference: 1.4e-7 and 1.1e-6.
    rel = 4e-6 if loss.kind == "simpo" else 7e-7
    assert result.loss == pytest.approx(float(expected.detach()), rel=rel)
    worst = max(float((session.gradient[n] - v.grad).norm() / v.grad.norm()) for n, v in values.items())
    print(f"{lab.twin.family.name} {loss.kind}: {len(values)} tensors, largest relative error {worst:.2e}")
    assert worst <= 2e-5  # 2.4e-6 measured
    return result


@pytest.mark.parametrize("name", choose(few=["sigmoid", "orpo"], usual=list(KINDS), every=list(KINDS)))
def test_every_gradient_of_a_preference_loss_equals_plain_autograd(deepseek_lab: Any, pairs: Any, name: str) -> None:
    check_against_plain(deepseek_lab, pairs, settings(name), max_tokens=30)


def test_so_it_does_in_every_family(lab: Any, pairs: Any) -> None:
    check_against_plain(lab, pairs, settings("smoothed"), max_tokens=1000)


@pytest.mark.parametrize("name", ["sigmoid", "orpo"])
def test_a_vocabulary_in_chunks_gives_the_same_in_more_slices(
    deepseek_lab: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    loss, session = settings(name), deepseek_lab.session()
    whole = deepseek_lab.forward_backward(session, pairs, 1000, loss, **options(loss))
    session.gradient = {}
    monkeypatch.setattr(losses, "MAX_LOGITS_ELEMENTS", 4 * deepseek_lab.twin.vocabulary + 1)
    chunked = deepseek_lab.forward_backward(session, pairs, 1000, loss, **options(loss))
    assert chunked.loss == whole.loss
    assert chunked.num_correct == whole.num_correct
    assert chunked.metrics == whole.metrics
    assert torch.equal(chunked.logprobs, whole.logprobs)
    for key, value in whole.gradient.items():
        assert torch.equal(chunked.gradient[key], value), key


def test_a_preference_loss_has_a_second_pass_only_where_one_chunk_is_not_enough(
    deepseek_lab: Any, make_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, loss, layers = deepseek_lab.session(), settings("simpo"), deepseek_lab.twin.num_layers
    batch = make_pairs((5, 3, 4))  # 7 + 8 loss tokens, of which 4 are shared: 11 places
    counted = []
    real = losses.log_softmax

    def counting(hidden: Any, weight: Any) -> Any:
        counted.append(len(hidden))
        return real(hidden, weight)

    monkeypatch.setattr("kt_runtime.resident.training.loss_slices.log_softmax", counting)
    slices = list(session.forward_backward(batch, loss, 1000))
    assert counted == [11]
    assert len(slices) == 1 + layers + 5 + layers
    counted.clear()
    monkeypatch.setattr(losses, "MAX_LOGITS_ELEMENTS", 4 * deepseek_lab.twin.vocabulary)
    slices = list(session.forward_backward(batch, loss, 1000))
    assert counted == [4, 4, 3] * 2
    assert len(slices) == 1 + layers + 9 + layers + 1  # the sum with the first gradient


def test_a_prompt_is_computed_once_and_reported_for_both(deepseek_lab: Any, make_pairs: Any) -> None:
    session, batch = deepseek_lab.session(), make_pairs((20, 3, 5))
    result = deepseek_lab.forward(session, batch, 1000, settings("orpo"))
    alone = deepseek_lab.forward(session, batch, 1000)
    assert (result.num_computed, alone.num_computed) == (19 + 3 + 5, 22 + 24)
    assert torch.equal(result.logprobs, alone.logprobs)
    chosen, rejected = result.logprobs.split(batch.lengths)
    assert torch.equal(chosen[:19], rejected[:19])


def test_metrics_of_the_logits_and_the_counts_are_the_plain_model_s(deepseek_lab: Any, pairs: Any) -> None:
    session, loss = deepseek_lab.session(), settings("sigmoid")
    result = deepseek_lab.forward(session, pairs, 40, loss, reference=REFERENCE)
    with torch.no_grad():
        logits = deepseek_lab.plain_logits(session, session.parameters, pairs)
    means = [float(of_sequence.mean()) for of_sequence in logits]
    assert result.metrics["logits/chosen"] == pytest.approx(sum(means[0::2]), abs=8e-8)  # 1e-8 measured
    assert result.metrics["logits/rejected"] == pytest.approx(sum(means[1::2]), abs=8e-8)
    sums = [float(values[counted].sum()) for values, counted in zip(*plain_logprobs(logits, pairs), strict=True)]
    # 4.0e-9 measured, 2.4e-8 portably
    assert result.metrics["logps/rejected"] == pytest.approx(sum(sums[1::2]), rel=4e-8)


def test_correct_tokens_are_counted_where_a_weight_is_not_zero(deepseek_lab: Any, make_batch: Any) -> None:
    session, batch = deepseek_lab.session(), make_batch(17, 30, 9)
    with torch.no_grad():
        answers = torch.cat([x.argmax(-1) for x in deepseek_lab.plain_logits(session, session.parameters, batch)])
    batch.targets[::2] = answers[::2].numpy()
    expected = (torch.from_numpy(batch.targets) == answers) & torch.from_numpy(batch.weights != 0)
    assert deepseek_lab.forward(session, batch, 40).num_correct == int(expected.sum()) > 10
    assert deepseek_lab.forward_backward(session, batch, 40).num_correct == int(expected.sum())


def test_of_equal_logits_the_first_is_the_answer() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [3.0, 1.0, 1.0], [3.0, 1.0, 1.0]])
    counted = torch.tensor([True, True, True, False])
    assert _is_argmax(logits, torch.tensor([1, 2, 0, 0]), counted).tolist() == [True, False, True, False]
