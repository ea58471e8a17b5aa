"""tests/gpu on a machine without a GPU: every file imports and has tests, and nothing passes for a run."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from reference.parity import Agreement
from reference.place import CPU

from kt_runtime.device import accelerator

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
# Bodies of the CPU's tests in tests/system, and the file that runs them on a GPU.
SHARED = {
    "training/test_parity_of_training_and_serving": "test_parity",
    "serving/test_serving_parity": "test_parity_in_float32",
    "adapters/test_publish_under_streams": "test_publish",
    "serving/test_engine_faults": "test_faults",
    "adapters/test_served": "test_adapters",
    "training/test_training_runs": "test_training",
    "cache/test_tiers": "test_cache",
    "serving/test_quantized_checkpoints": "test_formats",
}
# Claims about a CPU alone.
CPU_ONLY = {"test_training_with_other_roundings_would_be_noticed_on_a_gpu"}
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)


def run_pytest(output: Path, *arguments: str) -> tuple[int, str]:
    """Its status and what it printed. Runs in a fork of this process, which has imported PyTorch and SGLang already."""
    process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(output, arguments))
    process.start()
    process.join(300)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode, output.read_text()


def _run_pytest(output: Path, arguments: Sequence[str]) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.chdir(ROOT)
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    apart = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist"]
    sys.exit(pytest.main(["-q", "--capture=no", *apart, "tests/gpu", *arguments]))


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ids of all tests in tests/gpu. A file that does not import fails the run."""
    status, printed = run_pytest(tmp_path_factory.mktemp("gpu") / "printed", "--collect-only", "--gpu=collect")
    assert status == 0, printed
    return [line for line in printed.splitlines() if "::" in line]


def test_every_file_is_collected_and_has_tests(collected: list[str]) -> None:
    assert {line.split("::")[0].rpartition("/")[2] for line in collected} == set(FILES)


@pytest.mark.parametrize("body", SHARED)
def test_each_test_of_a_shared_file_is_among_those_of_the_gpu(collected: list[str], body: str) -> None:
    wanted = set(TEST.findall((ROOT / "tests" / "system" / f"{body}.py").read_text())) - CPU_ONLY
    of_gpu = [line for line in collected if line.startswith(f"tests/gpu/{SHARED[body]}.py::")]
    found = {line.split("::")[1].split("[")[0] for line in of_gpu}
    assert wanted <= found, wanted - found


@pytest.mark.parametrize("variant", ["deterministic", "no-graphs", "own-kernels", "hot", "streamed"])
def test_parity_is_tested_in_each_variant_for_each_family(collected: list[str], variant: str) -> None:
    name = "tests/gpu/test_parity.py::test_sampled_tokens_have_training_s_logprobs["
    rows = [line for line in collected if line.startswith(name) and variant in line]
    assert {family for line in rows for family in ("v2", "v3", "qwen3") if family in line} == {"v2", "v3", "qwen3"}


def test_without_a_gpu_a_run_that_asks_for_one_ends_with_2_and_the_reason(tmp_path: Path) -> None:
    if accelerator() is not None:
        pytest.skip("torch sees a GPU")
    status, printed = run_pytest(tmp_path / "printed", "--gpu=require")
    assert status == 2
    assert "tests/gpu: no test ran, torch sees no GPU: " in printed


def test_make_test_gpu_asks_for_a_gpu() -> None:
    done = subprocess.run(["make", "--dry-run", "test-gpu"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pytest --gpu=require tests/gpu" in done.stdout


def test_a_place_lets_through_what_it_promises_and_no_more() -> None:
    near = dataclasses.replace(CPU, name="near", k3=1e-6, largest=0.01)
    for place, k3, largest in ((CPU, 0.0, 0.0), (near, 1e-6, 0.01)):
        place.check(Agreement(k3, largest))
        place.check_same([1.0, 2.0], [1.0, 2.0 + largest / 2])
        for beyond in (Agreement(k3 + 1e-9, largest), Agreement(k3, largest + 1e-9), Agreement(float("nan"), 0.0)):
            with pytest.raises(AssertionError):
                place.check(beyond)
        with pytest.raises(AssertionError):
            place.check_same([1.0], [1.0 + largest + 1e-6])
    assert near.arguments(["--dtype", "float32"], ["--page-size", "8"]) == [
        *("--dtype", "float32", "--", "--page-size", "8"),
    ]


def test_only_the_folder_s_conftest_names_the_gpu_s_kind() -> None:
    """In code; SGLang's log lines and texts may."""
    kind = re.compile(r"""\.cuda\b|["']cuda\b""")
    assert [path.name for path in (ROOT / "tests" / "gpu").glob("*.py") if kind.search(path.read_text())] == [
        "conftest.py"
    ]
