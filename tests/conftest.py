"""What all tests share: the environment of `kt-runtime serve`, and garbage collection without what outlives a test.

SGLang compiles functions when they are first called, unless the environment forbids it before SGLang is imported.
`kt-runtime serve` forbids it on a machine without a GPU, and so it is here.

A process of several (`pytest -n 2`) computes with one thread of PyTorch: two that wait for each other burn both
processors.

Torch, transformers, SGLang and 5,000 collected tests are millions of objects. A full collection over them takes about a
second, and PyTorch, SGLang and Hugging Face's trainer ask for many.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest import logging as pytest_logging
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings
from reference.cases import choose, covering, of_few_values, position_on_axes
from reference.place import CPU, Place
from reference.server.processor_time import ProcessorTime

from kt_runtime.serve.launch import settings_before_imports
from kt_runtime.serve.memory.machine import has_gpu

for _name, _value in settings_before_imports(has_gpu()).items():
    os.environ.setdefault(_name, _value)

# The authorities' certificates are read once: that takes 24 ms, also for a client of http://.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)

# Transformers and TRL each ask which package every module is of: that takes 0.7 s.
importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)


class RootLogs(pytest_logging.catching_logs[Any]):
    """Adds a test's handler to the root logger only. pytest looks through all loggers, which are 1,900 where SGLang is
    imported, for those that do not propagate, six times a test. Messages of those are in no test's captured log."""

    def __enter__(self) -> Any:
        root = logging.getLogger()
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(root.level, self.level))
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        return self.handler


pytest_logging.catching_logs = RootLogs  # type: ignore[misc]

# Examples of tests that do not say how many: 100 are Hypothesis' own. No property fails by the clock: neither by
# one example that takes 200 ms on a busy machine, nor by the time that drawing them takes.
settings.register_profile(
    "cases",
    settings.default,
    max_examples=choose(few=25, usual=100, every=1000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("cases")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        choices=("auto", "require", "collect"),
        default="auto",
        help="tests/gpu: auto: run if torch sees a GPU; require: end with status 2 without one; collect: collect them "
        "anyway, to see that they import",
    )
    parser.addoption(
        "--processor-time",
        metavar="FILE",
        help="write the processor time of each file of tests to FILE, servers and other processes included",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; tests send it to their process
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        gc.disable()  # as in `pytest_collection`
        import torch  # after SGLang's environment is set

        torch.set_num_threads(1)
    config.addinivalue_line("markers", "slow: takes about a third of a second or more; not in `TEST_CASES=few`")
    if (path := config.getoption("--processor-time")) is not None:
        config.pluginmanager.register(ProcessorTime(Path(path)), "processor-time")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not choose(few=True, usual=False, every=False) or config.getoption("gpu") == "collect":
        return
    kept = _few(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _few(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of a test with parameters: few values of each, and of several parameters enough cases for each of these.

    Tests beside this file keep all values: they check the repository, and each value is another part of it."""
    kept, by_test = set[pytest.Item](), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            by_test[item.nodeid.partition("[")[0]].append(item)
    for of_test in by_test.values():
        cases = [position_on_axes(item) for item in of_test]
        if of_test[0].path.parent != Path(__file__).parent:
            few = of_few_values(cases)
            of_test, cases = [of_test[at] for at in few], [cases[at] for at in few]
        several = any(len(case) > 1 for case in cases)
        kept |= {of_test[at] for at in covering(cases)} if several else set(of_test)
    return kept


def _collect_and_freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection() -> None:
    gc.disable()  # what is imported and collected stays, and there is more and more of it


def pytest_collection_finish() -> None:
    """No collection now, which takes more than a second. To enable the collector with so many objects would start one.
    What is garbage by now stays."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # besides the full collection before each file
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Processes of several send three reports a test. Keywords are a third of each, and nothing reads them there."""
    report = yield
    report.keywords = {}
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """After a session's fixture, which may have imported SGLang."""
    value = yield
    if fixturedef.scope == "session":
        _collect_and_freeze()
    return value


@pytest.fixture(scope="session")
def place() -> Place:
    """Where servers compute. Folders of tests for a device have their own."""
    return CPU


@pytest.fixture(scope="module", autouse=True)
def freeze_what_earlier_modules_left() -> None:
    _collect_and_freeze()
