"""`kt-runtime bench train` on a tiny model: a real server, then Hugging Face + PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.bench.page.measurement import Measurement
from kt_runtime.bench.train.report import print_report

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]

ROW_KEYS = {
    "targets",
    "activations",
    "tokens_per_s",
    "hf_peft_tokens_per_s",
    "ratio",
    "peak_bytes",
    "hf_peft_peak_bytes",
}
QUICK = ("--model", "tiny-qwen3-moe", "--sequences", "3", "--tokens", "12", "--micro-batch", "2", "--steps", "2")


@pytest.fixture(scope="module")
def result(bench_output: BenchOutput) -> dict[str, Any]:
    choice = ("--targets", "attention+experts", "--dtype", "float32", "--peer-dtype", "float32", "--json")
    out, _ = bench_output("train", *QUICK, *choice)
    made: dict[str, Any] = json.loads(out)
    return made


def test_there_is_a_row_for_each_way_to_keep_activations(result: dict[str, Any]) -> None:
    assert [row["activations"] for row in result["rows"]] == ["retain", "recompute"]
    for row in result["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["targets"] == "attention+experts"
        assert len(row["step_seconds"]) == len(row["hf_peft_step_seconds"]) == 2
        assert row["tokens_per_s"] <= row["tokens_per_s_best"]
        assert row["ratio"] == row["tokens_per_s"] / row["hf_peft_tokens_per_s"]
        assert min(row["peak_bytes"], row["hf_peft_peak_bytes"]) > 1 << 28


def test_both_sides_fine_tune_the_same_model_on_the_same_tokens(result: dict[str, Any]) -> None:
    """The untrained adapter adds nothing, so the first losses are the base's; then both learn."""
    for row in result["rows"]:
        ours, theirs = row["losses"], row["hf_peft_losses"]
        assert ours[0] == pytest.approx(theirs[0], rel=9e-7)  # 9.9e-8 measured
        assert ours[-1] < ours[0] and theirs[-1] < theirs[0]
        # 8.1e-5 measured with AMX, AVX2 and portably: the adapters' first A differ. A learning rate 5 % larger: 5.7e-4.
        assert ours[-1] == pytest.approx(theirs[-1], rel=2.5e-4)


def test_the_settings_are_said(result: dict[str, Any]) -> None:
    assert result["training"]["micro_batch"] == 2
    assert result["training"]["dtype"] == result["peers"]["hf_peft"]["dtype"] == "float32"
    assert {"torch", "transformers", "peft"} <= result["peers"]["hf_peft"].keys()


def test_people_get_a_table(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_report(result)
    printed = capsys.readouterr().out
    assert "recompute" in printed and "float32" in printed and f"{result['rows'][0]['ratio']:.2f}x" in printed


def test_a_report_becomes_a_measurement(result: dict[str, Any], recorded: Recorded) -> None:
    made = recorded(result)
    for row, wanted in zip(made.tables[0].rows, result["rows"], strict=True):
        assert row.case == ["tiny-qwen3-moe", wanted["targets"], wanted["activations"]]
        assert float(str(row.figures[0])) == pytest.approx(wanted["tokens_per_s"], rel=1e-3)
        assert float(str(row.figures[3])) == pytest.approx(wanted["peak_bytes"] / 1e9, rel=1e-3)
