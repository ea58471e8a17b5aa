"""A publication gets copies of the masters as they are now, whatever was copied ahead and whatever has changed them."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from kt_runtime.adapters.tensors import Contents, measured
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training import portions
from kt_runtime.resident.training.copies import MasterCopies
from kt_runtime.resident.training.session import Session


def stepped(lab: Any, session: Session, names: list[str] | None = None) -> None:
    chosen = session.parameters if names is None else names
    session.gradient = {name: torch.full_like(session.parameters[name], 0.01) for name in chosen}
    lab.step(session, 1e-2)


def ahead(session: Session) -> set[str]:
    return set(session.copies._ahead)


def taken(session: Session) -> tuple[dict[str, torch.Tensor], Contents]:
    """Checks that copies and contents are those of the masters, and that the copies share no memory with them."""
    copies, contents = session.copies.take()
    assert copies.keys() == contents.keys() == session.parameters.keys()
    for name, value in session.parameters.items():
        assert torch.equal(copies[name], value) and copies[name].data_ptr() != value.data_ptr()
        assert contents[name] == measured(value), name
    return copies, contents


def published(session: Session) -> dict[str, torch.Tensor]:
    session.copies.publishing()
    return taken(session)[0]


@pytest.mark.parametrize("slice_elements", [1, 1 << 22], ids=["one parameter a slice", "one slice"])
def test_they_are_those_of_the_masters_after_each_step_and_each_load(
    deepseek_lab: Any, monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setattr(portions, "SLICE_ELEMENTS", slice_elements)
    session = deepseek_lab.session()
    start = published(session)
    for _ in range(3):
        stepped(deepseek_lab, session)
        assert ahead(session) == set(session.parameters)
        published(session)
        assert not ahead(session)
    stepped(deepseek_lab, session)
    run_at_once(session.restore(start, {}, 0, 0))
    assert not ahead(session)
    published(session)
    session.close()


def test_a_later_step_leaves_taken_copies_as_they_are(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    published(session)
    stepped(deepseek_lab, session)
    copies = published(session)
    before = {name: value.clone() for name, value in copies.items()}
    for _ in range(2):  # the second one uses the memory of the first one's copies again, which nobody has taken
        stepped(deepseek_lab, session)
    taken(session)
    assert all(torch.equal(copies[name], before[name]) for name in copies)
    session.close()


def test_a_step_that_changes_some_masters_copies_only_these_ahead(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    published(session)
    stepped(deepseek_lab, session)
    published(session)
    name = sorted(session.parameters)[0]
    stepped(deepseek_lab, session, [name])
    assert ahead(session) == {name}
    published(session)
    session.close()


def test_where_every_third_step_is_published_only_every_third_step_copies(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    counts = []
    for step in range(1, 10):
        stepped(deepseek_lab, session)
        counts.append(len(ahead(session)))
        if step % 3 == 0:
            published(session)
    everything = len(session.parameters)
    assert counts == [0, 0, 0, 0, 0, everything, 0, 0, everything]
    stepped(deepseek_lab, session)
    published(session)  # earlier than expected
    stepped(deepseek_lab, session)
    assert len(ahead(session)) == everything
    session.close()


def test_a_partial_step_after_an_unexpected_one_keeps_nothing_of_freed_copies(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    for _ in range(2):
        stepped(deepseek_lab, session)
    published(session)
    name = sorted(session.parameters)[0]
    for names in ([name], None, [name]):
        stepped(deepseek_lab, session, names)
    taken(session)
    session.close()


def test_a_session_that_does_not_publish_copies_nothing(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    stepped(deepseek_lab, session)
    assert not ahead(session)
    taken(session)
    session.close()


def test_nothing_is_copied_ahead_without_memory_for_it(deepseek_lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = deepseek_lab.session()
    published(session)
    size = sum(4 * value.numel() for value in session.parameters.values())
    full = psutil.virtual_memory()._replace(available=size - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    stepped(deepseek_lab, session)
    assert not ahead(session)
    published(session)
    session.close()


def test_masters_on_an_accelerator_are_not_copied_ahead() -> None:
    copies = MasterCopies({"m.lora_A": torch.empty(2, 3)}, None)
    copies.publishing()
    copies.step_begins()
    copies.stepped(["m.lora_A"])
    assert not copies._ahead
    values, contents = copies.take()
    assert values["m.lora_A"].shape == (2, 3) and contents == {}
