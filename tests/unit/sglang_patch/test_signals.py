"""Only the frontend of a server is ended by a signal."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator

import pytest

from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.sglang_patch import signals
from kt_runtime.sglang_patch.hooks import Hooks

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ResidentSettings(
        model="m", model_directory="/m", wire_address="w", names_address="n", adapter_directory="/a"
    )
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)


def test_a_process_that_the_frontend_started_leaves_them_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_server(monkeypatch)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    signals.install(Hooks(on_cpu=True))
    assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.parametrize("is_a_servers", [True, False])
def test_the_frontend_and_other_programs_keep_theirs(monkeypatch: pytest.MonkeyPatch, is_a_servers: bool) -> None:
    if is_a_servers:
        of_a_server(monkeypatch)
    else:
        monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    before = [signal.getsignal(number) for number in NUMBERS]
    signals.install(Hooks(on_cpu=True))
    assert [signal.getsignal(number) for number in NUMBERS] == before
