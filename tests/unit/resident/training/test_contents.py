"""What is known of a session's masters is that of their values now, whatever has changed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kt_runtime.adapters.tensors import Contents, measured
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training import checkpoint, portions
from kt_runtime.resident.training.contents import MasterContents
from kt_runtime.resident.training.session import Session


def now(session: Session) -> Contents:
    return {name: measured(value) for name, value in session.parameters.items()}


def stepped(lab: Any, session: Session, learning_rate: float = 1e-2) -> None:
    session.gradient = {name: torch.full_like(value, 0.01) for name, value in session.parameters.items()}
    lab.step(session, learning_rate)


@pytest.mark.parametrize("slice_elements", [1, 1 << 22], ids=["one parameter a slice", "one slice"])
def test_after_each_step_and_each_load_they_are_those_of_the_masters(
    deepseek_lab: Any, monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setattr(portions, "SLICE_ELEMENTS", slice_elements)
    session = deepseek_lab.session()
    session.contents.keep()
    assert session.contents.known() == {}
    start = checkpoint.masters_copied_at_once(session)
    for _ in range(3):
        stepped(deepseek_lab, session)
        assert session.contents.known() == now(session)
    values = {
        f"{name}.lora_{letter}": t for name, (a, b) in start.modules.items() for letter, t in (("A", a), ("B", b))
    }
    run_at_once(session.restore(values, {}, 0, 0))
    assert session.contents.known() == now(session)
    session.close()
    assert session.contents.known() == {}


def test_a_step_that_changes_some_masters_drops_only_what_was_known_of_these(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    session.contents.keep()
    stepped(deepseek_lab, session)
    name = sorted(session.parameters)[0]
    session.gradient = {name: torch.full_like(session.parameters[name], 0.01)}
    before = session.contents.known()
    deepseek_lab.step(session)
    after = session.contents.known()
    assert after == now(session)
    assert [key for key in after if after[key] != before[key]] == [name]
    session.close()


def test_a_session_that_does_not_publish_measures_nothing(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    stepped(deepseek_lab, session)
    assert session.contents.known() == {}
    session.close()


def test_masters_on_an_accelerator_are_not_measured_beside_it() -> None:
    contents = MasterContents({"m.lora_A": torch.empty(2, 3, device="meta")})
    contents.keep()
    contents.changed(["m.lora_A"])
    assert contents.known() == {}
