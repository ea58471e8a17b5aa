"""The run of `kt-runtime bench gpu` with the CPU in the GPU's place: real servers, the peers, and what fails.

Without a GPU hot and streamed experts are left out, and stock SGLang does not start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from system.bench.conftest import measure_limits_briefly
from system.forked_server import ForkedScript

from kt_runtime.bench.experts.kt_kernel import plain_environment
from kt_runtime.bench.gpu import run as gpu_run
from kt_runtime.bench.gpu import servers
from kt_runtime.bench.gpu.limits import GpuLimits, Sizes, measure_gpu_limits
from kt_runtime.bench.gpu.models import shape
from kt_runtime.bench.gpu.plan import Plan
from kt_runtime.bench.gpu.settings import Setting, kt_settings
from kt_runtime.bench.page.measurement import Measurement
from kt_runtime.bench.serve.peers import HUGGING_FACE, SCRIPT, ScriptPeer
from kt_runtime.bench.serve.work import ModelWork
from kt_runtime.device import DeviceFacts, DeviceMemory

Recorded = Callable[[dict[str, Any]], Measurement]
CPU = torch.device("cpu")
PLAN = Plan(
    models=("tiny-qwen3-moe",),
    prefill=(64,),
    streams=(1, 2),
    prompt_tokens=16,
    new_tokens=192,  # fewer are decoded before a busy machine begins the other stream
    runs=2,
    resident_shares=(0.5,),
    sequences=2,
    tokens=16,
)


def forked_peer(peer: ScriptPeer, question: Path, log: IO[bytes]) -> ForkedScript:
    """test_serve.py starts it in a new interpreter, as users have it."""
    assert peer.engine == HUGGING_FACE
    return ForkedScript(SCRIPT, str(question), plain_environment(), log)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    def without_gpu(work: ModelWork, counts: Sequence[int]) -> list[Setting]:
        """The first setting, and the streamed one with an option that no server has."""
        cpu, _, streamed, *_ = kt_settings(work, counts)
        return [cpu, dataclasses.replace(streamed, options=("--no-such-option",))]

    def limits(device: torch.device) -> GpuLimits:
        return measure_gpu_limits(device, Sizes(1 << 20, 1 << 20, side=64, calls=2))

    free = iter(range(1000, 0, -10))
    with pytest.MonkeyPatch.context() as patch:
        measure_limits_briefly(patch)
        patch.setattr(ScriptPeer, "_start", forked_peer)
        patch.setattr(gpu_run, "kt_settings", without_gpu)
        patch.setattr(gpu_run, "measure_gpu_limits", limits)
        patch.setattr(gpu_run, "_current", lambda _: DeviceFacts("a CPU", 0, 100, 200, ""))
        patch.setattr(servers, "memory", lambda _: DeviceMemory(next(free), 2000))
        return gpu_run.measured_on(CPU, PLAN, [shape(name, 2) for name in PLAN.models], lambda _: None)


def rows(report: dict[str, Any], engine: str, setting: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["engine"] == engine and setting in row["setting"]]


def test_the_server_is_measured_in_every_case_with_shares_of_the_limits(report: dict[str, Any]) -> None:
    ours = rows(report, "kt-runtime", "experts on the CPU")
    assert [(row["case"], row.get("tokens", row.get("streams"))) for row in ours] == [
        *(("prefill", 64), ("decode", 1), ("decode", 2), ("training", 32)),
    ]
    for row in ours:
        assert row["problem"] is None and len(row["tokens_per_s_runs"]) == 2
        assert 0 < row["tokens_per_s_least"] <= row["tokens_per_s"]
        assert row["shares"].keys() == {"dram", "cpu_arithmetic", "device_memory", "device_arithmetic"}
        assert row["limit_share"] == max(row["shares"].values())
    assert all(row["device_bytes"] == 10 for row in ours[:3])


def test_a_setting_whose_server_does_not_start_has_the_reason_in_its_rows(report: dict[str, Any]) -> None:
    failed = rows(report, "kt-runtime", "streamed")
    assert [row["case"] for row in failed] == ["prefill", "training"]
    for row in failed:
        assert row["tokens_per_s"] is None and "status 2" in row["problem"] and "--no-such-option" in row["problem"]


def test_stock_sglang_is_started_without_our_plugins_and_fails_without_a_gpu(report: dict[str, Any]) -> None:
    stock = rows(report, "sglang_paged", "4 paged experts a layer")
    assert [row["case"] for row in stock] == ["prefill", "decode", "decode"]
    assert all(row["tokens_per_s"] is None and "ended with status" in row["problem"] for row in stock)
    assert not any("kt-runtime:" in row["problem"] for row in stock)


def test_hugging_face_computes_the_same_tokens(report: dict[str, Any]) -> None:
    theirs = rows(report, "hugging_face", "on cpu")
    assert len(theirs) == 3 and all(row["tokens_per_s"] > 0 and row["shares"] == {} for row in theirs)


def test_bars_without_their_rows_stay_open(report: dict[str, Any]) -> None:
    found = {bar["what"]: bar["is_met"] for bar in report["bars"]}
    assert found.pop("decode, experts on the CPU: share of the DRAM limit") is not None
    assert set(found.values()) == {None}


def test_the_report_becomes_a_measurement(report: dict[str, Any], recorded: Recorded, tmp_path: Path) -> None:
    made = recorded(report)
    assert made.kind == "gpu" and len(made.tables[0].rows) == len(report["rows"])
    assert {figure.unit for figure in made.figures} == {"GB/s", "GFLOP/s", "GB", "ratio"}
