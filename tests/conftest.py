"""What all tests share: garbage collection leaves alone what outlives a test.

Torch, transformers, SGLang and 5,000 collected tests are millions of objects. A full collection over them takes about a
second, and PyTorch, SGLang and Hugging Face's trainer ask for many.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest


def _collect_and_freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _collect_and_freeze()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """After a session's fixture, which may have imported SGLang."""
    value = yield
    if fixturedef.scope == "session":
        _collect_and_freeze()
    return value


@pytest.fixture(scope="module", autouse=True)
def freeze_what_earlier_modules_left() -> None:
    _collect_and_freeze()
