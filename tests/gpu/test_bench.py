"""`kt-runtime bench gpu`, `serve` and `train` on a machine with a GPU, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference.server.command_line import run_command

from kt_runtime.bench.page.measurement import read_all
from kt_runtime.bench.page.report import record_report

MODEL = "tiny-qwen3-moe"
SIZES = ("--runs", "2", "--streams", "1", "--streams", "2", "--prefill", "64")
TRAINING = ("--sequences", "2", "--tokens", "12", "--steps", "2", "--targets", "attention")


def bench(*arguments: str, directory: Path) -> dict[str, Any]:
    done = run_command("bench", *arguments, "--json", directory=directory)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bench_gpu_measures_every_engine_and_its_report_is_recorded(tmp_path: Path) -> None:
    report = bench("gpu", "--models", MODEL, *SIZES, "--resident", "0.5", directory=tmp_path)
    ours = [row for row in report["rows"] if row["engine"] == "kt-runtime"]
    assert {row["case"] for row in ours} == {"prefill", "decode", "training"}
    assert [row["problem"] for row in report["rows"] if row["problem"]] == []
    assert all(row["tokens_per_s"] > 0 for row in report["rows"])
    assert all(row["device_bytes"] > 0 for row in ours if row["case"] != "training")
    assert all(share > 0 for row in ours for share in row["shares"].values())
    assert all(limit > 0 for limit in report["machine"]["limits"].values()) and report["machine"]["gpu"]
    (tmp_path / "report.json").write_text(json.dumps(report))
    origin: dict[str, str | None] = dict.fromkeys(("title", "machine", "hardware", "ran", "commit"), "x")
    (tmp_path / "measurements").mkdir()
    record_report(tmp_path / "report.json", tmp_path / "measurements", "one", origin | {"date": "2026-01-31"})
    assert read_all(tmp_path / "measurements")["one"].kind == "gpu"


@pytest.mark.parametrize("dtype", [(), ("--dtype", "float32")], ids=["default", "float32"])
def test_bench_serve_measures_the_server_and_hugging_face_on_the_device(tmp_path: Path, dtype: tuple[str, ...]) -> None:
    report = bench("serve", "--quick", "--model", MODEL, "--rank", "4", *dtype, directory=tmp_path)
    assert all(row["tokens_per_s"] > 0 for row in report["rows"])
    assert report["peers"]["hugging_face"]["device"] != "cpu" and report["peers"]["hugging_face"]["problem"] is None


def test_bench_train_measures_the_server_and_its_peer_on_the_device(tmp_path: Path) -> None:
    report = bench("train", "--model", MODEL, *TRAINING, directory=tmp_path)
    for row in report["rows"]:
        assert row["tokens_per_s"] > 0 and row["hf_peft_tokens_per_s"] > 0
        assert row["losses"][0] == pytest.approx(row["hf_peft_losses"][0], abs=0.05)
    facts = report["peers"]["hf_peft"]["by_targets"]["attention"]
    assert facts["device"] != "cpu" and facts["device_peak_bytes"] > 0
