"""Tests on the emulated accelerator. It is the accelerator of the whole process from its first use on, and the other
tests assume a machine without one. So this folder runs in two processes of its own, which `pytest tests` and
`make test` start and wait for. `pytest tests/device` and `pytest tests/device/test_x.py::test_y` run in the process.

`TEST_CASES=all` (docs/testing.md): under 20 random schedules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from device import backend
from reference.cases import choose

HERE = Path(__file__).resolve().parent
# Servers are forks only of a process that has not the device itself; else each would be a new interpreter.
WITH_SERVERS = [str(HERE / name) for name in ("test_serving.py", "test_serving_in_bf16.py")]
PROCESSES = {
    HERE / "test_serving.py": WITH_SERVERS,
    HERE / "test_training.py": [str(HERE), *(f"--ignore={path}" for path in WITH_SERVERS)],
}
"""What each process runs, by the file that stands for all of it. A process of fewer tests imports as much as these."""
SEEDS = choose(few=3, usual=3, every=20)
SCHEDULES = ["late", "eager", *(f"random-{seed}" for seed in range(SEEDS))]

# Of the norm of an expert layer's result, against float64. 4.1e-7 and 5.5e-3 measured with 40 seeds of both forms of
# hot experts, beside a store on portable, AVX2, AVX-512 and AMX kernels.
EXPERT_TOLERANCES = {torch.float32: 2.5e-6, torch.bfloat16: 1.2e-2}


class FailedProcess(Exception):
    """A process did not end with success; the text is what it printed."""


class InItsOwnProcess(pytest.Item):
    """Tests of the folder. With one thread of PyTorch: operators here are too small for two, which would wait for each
    other."""

    def runtest(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment["OMP_NUM_THREADS"] = "1"
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no"]
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, *PROCESSES[self.path]]
        done = subprocess.run(command, env=environment, cwd=self.config.rootpath, capture_output=True, text=True)
        self.add_report_section("call", "its own process", done.stdout[-2000:])
        if done.returncode != 0:
            raise FailedProcess(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if isinstance(excinfo.value, FailedProcess):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{' '.join(PROCESSES[self.path])}, in a process of their own"


class FilesInTheirOwnProcess(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        item = InItsOwnProcess.from_parent(self, name="in_its_own_process")
        item.add_marker(pytest.mark.timeout(0))  # each test of the process has its limit
        yield item


def is_process_of_these_tests(config: pytest.Config) -> bool:
    given = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return all(path.is_relative_to(HERE) for path in given)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if is_process_of_these_tests(config) or HERE not in collection_path.parents:
        return None
    return collection_path not in PROCESSES or None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if is_process_of_these_tests(parent.config) or module_path not in PROCESSES:
        return None
    return FilesInTheirOwnProcess.from_parent(parent, path=module_path)


def used(schedule: str) -> Iterator[torch.device]:
    device = backend.enable()
    name, _, seed = schedule.partition("-")
    backend.set_schedule(name, int(seed or 0))
    torch.ops.late.forget_hidden_waits()
    yield device
    torch.accelerator.synchronize()  # what failed in queued work fails the test that queued it
    torch.accelerator.set_stream(backend.default_stream())


@pytest.fixture
def late_device() -> Iterator[torch.device]:
    """The emulated device, whose work runs as late as it may."""
    yield from used("late")


@pytest.fixture
def delay() -> Callable[[], None]:
    """Keeps a stream busy: nothing to do, since it is as late as it may be anyway."""
    return lambda: None


@pytest.fixture(scope="session")
def expert_tolerance() -> Callable[[torch.dtype, int], float]:
    """For the bodies in tests/reference/on_device. Their sums are as long as those that were measured."""
    return lambda dtype, length: EXPERT_TOLERANCES[dtype]


@pytest.fixture(params=SCHEDULES)
def scheduled_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The emulated device under each schedule: for tests that take little time."""
    yield from used(request.param)
