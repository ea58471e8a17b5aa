"""Attributes that SGLang's own registry can't hook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kt_runtime.errors import ConflictError
from kt_runtime.sglang_patch import hooks


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module `there` with one attribute, `limit`."""
    module = SimpleNamespace(limit=10)
    monkeypatch.setattr(hooks.pkgutil, "resolve_name", {"there": module}.__getitem__)
    return module


def test_what_is_added_must_not_be_there_yet(target: SimpleNamespace) -> None:
    hooks._set_attribute("there.copy", print, is_there=False)
    assert target.copy is print
    with pytest.raises(ConflictError, match=r"there\.limit exists"):
        hooks._set_attribute("there.limit", 5, is_there=False)


def test_what_is_set_must_be_there(target: SimpleNamespace) -> None:
    hooks._set_attribute("there.limit", 5, is_there=True)
    assert target.limit == 5
    with pytest.raises(ConflictError, match=r"there\.limits is missing"):
        hooks._set_attribute("there.limits", 5, is_there=True)


def test_the_same_value_may_be_set_twice(target: SimpleNamespace) -> None:
    for _ in range(2):
        hooks._set_attribute("there.copy", print, is_there=False)
    assert target.copy is print
