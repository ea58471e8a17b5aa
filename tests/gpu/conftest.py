"""Runs the tests' bodies on an NVIDIA GPU: the one file of this folder that names CUDA.

`make test-gpu` asks for a GPU (`--gpu=require`) and ends with status 2 where torch sees none. Otherwise the folder is
collected where there is one, or with `--gpu=collect`, which shows that every file imports.

A module's `PLACES` names the variants (keys of `PLACES` below) that its tests run in, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.on_device.recorded_graph import GraphBackend
from reference.place import Place

# The shared servers, and the marker `preset`, which leaves out those that a module does not need.
from system.conftest import (  # noqa: F401
    cached_server,
    float32_server,
    float32_servers,
    pytest_collection_modifyitems,
)

from kt_runtime.bench.gpu.settings import HOT, NO_GRAPHS, STREAMED
from kt_runtime.sglang_patch.gpu import experts

DEVICE = "cuda"
# SGLang 0.5.23's batch-invariant kernels. Its own choice of attention for them needs Hopper at least; Triton's runs on
# every GPU, for both kinds of attention, and in float32.
DETERMINISTIC = ("--enable-deterministic-inference", "--attention-backend", "triton")
K3 = 1e-6
"""The bar of issue 16 with deterministic kernels."""
LARGEST = 7e-3
"""Of a log-probability. Five times sqrt(2 K3): k3 is about d^2 / 2. Derived, not measured."""
ROUNDED_K3, ROUNDED_LARGEST = 1e-3, 0.22
"""`reference.parity.GPU_K3`, where independent roundings to bf16 would be noticed, and five times its root. Other
kernels, or experts in bf16 on another device, have no bar: their tests print what they find."""
FLOAT32_FACTOR = 100.0
"""Triton multiplies float32 as TF32, whose significands are 2^13 times as coarse. Derived, not measured."""
SOME_EXPERTS = "512KiB"
"""Of a tiny model: in bf16 a third to a half of all experts, in float32 one of each layer."""


def _place(name: str, *options: str, passed_on: tuple[str, ...] = DETERMINISTIC, rounded: bool = False) -> Place:
    k3, largest = (ROUNDED_K3, ROUNDED_LARGEST) if rounded else (K3, LARGEST)
    return Place(
        name,
        DEVICE,
        options,
        passed_on,
        k3=k3,
        largest=largest,
        float32_factor=FLOAT32_FACTOR,
        same_training=False,  # gradients of attention are summed by atomic additions
    )


PLACES = {
    place.name: place
    for place in (
        _place("deterministic"),
        _place("no-graphs", NO_GRAPHS),
        _place("own-kernels", passed_on=(), rounded=True),
        _place("hot", HOT, SOME_EXPERTS, rounded=True),
        _place("streamed", *STREAMED, rounded=True),
    )
}


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[getattr(request, "param", "deterministic")]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU."""
    return torch.device(DEVICE, 0)


@pytest.fixture(scope="session")
def expert_tolerance() -> Callable[[torch.dtype, int], float]:
    """Of hot experts: float32 sums of so many terms, whose roundings add up as a random walk; in bf16 the factors of
    products and the result are rounded too. Derived, not measured."""
    return lambda dtype, length: 1e-6 * length**0.5 + (3 * 2.0**-8 if dtype == torch.bfloat16 else 0.0)


@pytest.fixture
def delay() -> Callable[[], None]:
    """A function that keeps the current stream busy for some 30 ms."""
    return lambda: torch.cuda._sleep(50_000_000)


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> GraphBackend:
    """SGLang's breakable graphs over CUDA's, in one memory pool."""
    monkeypatch.setattr(experts, "_sets", {})
    return GraphBackend(torch.cuda.Stream(device), torch.cuda.graph_pool_handle())


def _why_no_gpu() -> str:
    """Empty if torch sees a GPU."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch finds no device"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "preset(name): of the servers of `float32_server`, this one is enough")
    reason = _why_no_gpu()
    if reason and config.getoption("--gpu") == "require":
        pytest.exit(f"tests/gpu: no test ran, torch sees no GPU: {reason}", returncode=2)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    is_wanted = config.getoption("--gpu") == "collect" or torch.cuda.is_available()
    return None if is_wanted else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = getattr(metafunc.module, "PLACES", None)
    if names and "place" in metafunc.fixturenames:
        metafunc.parametrize("place", names, indirect=True, scope="session")


def pytest_report_header(config: pytest.Config) -> str | None:
    return _not_run(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if line := _not_run(config):
        terminalreporter.write_line(line)


def _not_run(config: pytest.Config) -> str | None:
    reason = _why_no_gpu()
    if not reason or config.getoption("--gpu") == "collect":
        return None
    return f"tests/gpu: not run, torch sees no GPU: {reason}"
