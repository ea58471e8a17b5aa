"""Attributes that SGLang's own registry can't hook, and the modules that hold a hooked function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace

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


def imported(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def functions(count: int) -> list[Callable[[], int]]:
    return [partial(int, number) for number in range(count)]


@pytest.mark.parametrize("by", ["the registry", "Bindings"])
def test_a_hooked_function_is_replaced_in_every_module_that_holds_it(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways do the same: also for modules that are imported between two hooks, and for a second hook."""
    from sglang.srt.plugins.hook_registry import _propagate_patch

    first, second, first_hooked, again, second_hooked = functions(5)
    source = imported(monkeypatch, "kt_test_source", first=first, second=second)
    user = imported(monkeypatch, "kt_test_user", renamed=first, twice=first, second=second, other=7)
    propagate = _propagate_patch
    if by == "Bindings":
        targets = ("kt_test_source.first", "kt_test_source.second", "kt_test_late.first", "kt_test_source.no", "no.one")
        propagate = hooks.Bindings(targets, _propagate_patch).propagate
    source.first = first_hooked  # type: ignore[attr-defined]
    assert propagate(first, first_hooked, source) == 2
    assert vars(user)["renamed"] is vars(user)["twice"] is first_hooked and vars(user)["second"] is second

    late = imported(monkeypatch, "kt_test_late", second=second, first=first_hooked)
    user.lazy = second  # type: ignore[attr-defined]
    source.second = second_hooked  # type: ignore[attr-defined]
    assert propagate(second, second_hooked, source) == 3
    assert vars(late)["second"] is vars(user)["second"] is vars(user)["lazy"] is second_hooked

    late.first = again  # type: ignore[attr-defined]
    assert propagate(first_hooked, again, late) == 3
    assert source.first is again and vars(user)["renamed"] is vars(user)["twice"] is again

    unnamed, unnamed_hooked = functions(2)
    user.unnamed = unnamed  # type: ignore[attr-defined]
    assert propagate(unnamed, unnamed_hooked, SimpleNamespace) == 1
    assert vars(user)["unnamed"] is unnamed_hooked and source.second is second_hooked


def test_a_module_of_sglang_holds_a_hooked_function_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "OWN_NAMES", frozenset(("kt_test_user",)))
    first, hooked, other = functions(3)
    source = imported(monkeypatch, "kt_test_source", first=first)
    user = imported(monkeypatch, "kt_test_user", first=first, renamed=first)
    other_user = imported(monkeypatch, "kt_test_user.other", first=other)
    assert hooks.Bindings(["kt_test_source.first"], _unused).propagate(first, hooked, source) == 1
    assert vars(user)["first"] is hooked and vars(user)["renamed"] is first and vars(other_user)["first"] is other


def _unused(_original: object, _wrapped: object, _source: object) -> int:
    raise AssertionError("the function has a target")
