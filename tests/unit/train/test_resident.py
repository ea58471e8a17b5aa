"""Clients of the resident and what replaces them in tests have the same methods with the same parameters.

mypy compares everything but the names of parameters that may be given by position.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from reference.resident.counting_resident import CountingResident

from kt_runtime.train.resident import Resident
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.async_client import AsyncResident, AsyncResidentClient


def methods(protocol: Any) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


def difference(protocol: Any, implementation: Any, method: str) -> str | None:
    """An implementation may have more parameters, each with a default."""
    wanted, found = (inspect.signature(getattr(each, method)).parameters for each in (protocol, implementation))
    for place, (name, parameter) in enumerate(wanted.items()):
        if name not in found or found[name].kind != parameter.kind or list(found)[place] != name:
            return f"{method}: {list(found)}, not {list(wanted)}"
    required = [name for name in found.keys() - wanted.keys() if found[name].default is inspect.Parameter.empty]
    return f"{method}: {required} more" if required else None


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [(Resident, ResidentClient), (Resident, CountingResident), (AsyncResident, AsyncResidentClient)],
)
def test_a_client_and_its_replacement_in_tests_name_parameters_alike(protocol: Any, implementation: Any) -> None:
    assert methods(protocol)
    assert [found for each in methods(protocol) if (found := difference(protocol, implementation, each))] == []


def test_another_name_is_noticed() -> None:
    class Renamed(CountingResident):
        def publish(self, session_name: str, name: str, *, take_over: bool = False) -> Any:
            raise AssertionError

    assert difference(Resident, Renamed, "publish") is not None
