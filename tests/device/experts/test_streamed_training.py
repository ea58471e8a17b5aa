"""Training whose experts stream to the emulated device gives the numbers of training whose experts the CPU computes."""

# ruff: noqa: F811, a test names its fixtures
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device import backend
from device.conftest import SCHEDULES
from device.test_training import FAMILIES, Make, checkpoints, make, trained  # noqa: F401
from reference.cases import choose
from unit.resident.conftest import Lab, make_batch  # noqa: F401

from kt_runtime.experts.gpu.paths import StreamedTokens, StreamingRule, attach_ring
from kt_runtime.experts.gpu.ring import ExpertRing

LOSS = 1.6e-7  # 7.3e-8 measured with AVX-512, 3.3e-8 with AVX2
NORM = 2e-6  # 6.2e-7 and 2.1e-7
PARAMETER = 2e-5  # 1.0e-5 and 3.6e-6, of parameters that moved by 0.015


@pytest.fixture
def rings() -> Iterator[list[ExpertRing]]:
    made: list[ExpertRing] = []
    yield made
    for ring in made:
        ring.close()


def streaming(lab: Lab, where: torch.device, rings: list[ExpertRing]) -> StreamedTokens:
    """The layers of the lab's store stream every call."""
    store = lab.host.experts
    rings.append(ExpertRing(where, store.shape, 3))
    return attach_ring([store.layers[index] for index in sorted(store.layers)], rings[-1], StreamingRule(1))


EACH = [(family, dropout) for dropout in (0.2, 0.0) for family in FAMILIES]


@pytest.mark.parametrize(("family", "dropout"), choose(few=EACH[:4], usual=EACH[:4], every=EACH))
def test_streamed_training_gives_the_numbers_of_staged_training(
    late_device: torch.device, make: Make, make_batch: Any, rings: list[ExpertRing], family: str, dropout: float
) -> None:
    batches = [make_batch(20, 11, 25, seed=step) for step in range(2)]
    wanted, reference = trained(make(family, late_device), batches, dropout=dropout)
    lab = make(family, late_device)
    counts = streaming(lab, late_device, rings)
    got, session = trained(lab, batches, dropout=dropout)
    values = {name: parameter.detach().cpu() for name, parameter in session.parameters.items()}
    worst = max(float((values[name] - p.detach().cpu()).abs().max()) for name, p in reference.parameters.items())
    relative = [max(abs(g / w - 1) for g, w in zip(got[i::2], wanted[i::2], strict=True)) for i in range(2)]
    print(f"{family}: differences of losses {relative[0]:.1e}, norms {relative[1]:.1e}, parameters {worst:.1e}")
    assert counts.forward >= 2 * (20 + 11 + 25) and counts.backward >= 2 * (20 + 11 + 25)
    assert relative[0] <= LOSS and relative[1] <= NORM and worst <= PARAMETER


def test_no_order_of_work_changes_a_bit(
    late_device: torch.device, make: Make, make_batch: Any, rings: list[ExpertRing], subtests: pytest.Subtests
) -> None:
    def found() -> tuple[list[float], dict[str, torch.Tensor]]:
        lab = make("qwen3_moe", late_device)
        streaming(lab, late_device, rings)
        numbers, session = trained(lab, [make_batch(12, 9, seed=4)], dropout=0.2)
        return numbers, {name: parameter.detach().cpu() for name, parameter in session.parameters.items()}

    numbers, values = found()
    for schedule in SCHEDULES[1:]:
        with subtests.test(schedule):
            kind, _, seed = schedule.partition("-")
            backend.set_schedule(kind, int(seed or 0))
            others, changed = found()
            assert others == numbers
            assert all(torch.equal(value, changed[name]) for name, value in values.items())
