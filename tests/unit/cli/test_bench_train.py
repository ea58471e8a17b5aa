"""`kt-runtime bench train` on a tiny model: a real server, then Hugging Face + PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.bench.page.measurement import Measurement
from kt_runtime.bench.train import peer
from kt_runtime.bench.train.plan import Plan
from kt_runtime.bench.train.report import print_report
from kt_runtime.errors import RuntimeFault

Run = Callable[..., subprocess.CompletedProcess[str]]
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
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bench-train")
    choice = ("--targets", "attention+experts", "--dtype", "float32", "--peer-dtype", "float32", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "kt_runtime.cli.main", "bench", "train", *QUICK, *choice],
        cwd=directory,
        env=os.environ | {"TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not list(directory.glob("kt-runtime-bench-*")), "the temporary checkpoint is left"
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_there_is_a_row_for_each_way_to_keep_activations(result: dict[str, Any]) -> None:
    assert [row["activations"] for row in result["rows"]] == ["retain", "recompute"]
    for row in result["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["targets"] == "attention+experts"
        assert len(row["step_seconds"]) == len(row["hf_peft_step_seconds"]) == 2
        assert row["tokens_per_s"] <= row["tokens_per_s_best"]
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["hf_peft_tokens_per_s"])
        assert min(row["peak_bytes"], row["hf_peft_peak_bytes"]) > 1 << 28


def test_both_sides_fine_tune_the_same_model_on_the_same_tokens(result: dict[str, Any]) -> None:
    """The untrained adapter adds nothing, so the first losses are the base's; then both learn."""
    for row in result["rows"]:
        ours, theirs = row["losses"], row["hf_peft_losses"]
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[-1] < ours[0] and theirs[-1] < theirs[0]
        assert ours[-1] == pytest.approx(theirs[-1], rel=5e-3)


def test_the_settings_are_said(result: dict[str, Any]) -> None:
    assert result["training"]["micro_batch"] == 2
    assert result["training"]["dtype"] == result["peers"]["hf_peft"]["dtype"] == "float32"
    assert {"torch", "transformers", "peft"} <= result["peers"]["hf_peft"].keys()


def test_people_get_a_table(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_report(result)
    printed = capsys.readouterr().out
    assert "recompute" in printed and "float32" in printed and f"{result['rows'][0]['ratio']:.2f}x" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "1"), "--tokens is 1"),
        (("--micro-batch", "0"), "--micro-batch is 0"),
        (("--dtype", "bfloat61"), "bfloat16"),
        (("--layers", "99"), "--layers is 99"),
        (("--model", "tiny-qwen4"), "tiny-qwen4"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(run: Run, arguments: tuple[str, str], message: str) -> None:
    done = run("bench", "train", *QUICK, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "starting a server" not in done.stderr


def test_a_peer_that_does_not_end_is_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer, "TIMEOUT_S", 0.01)
    unasked = peer.Peer(Plan(), tmp_path, np.zeros((1, 4), np.int64), lambda _: None)
    with pytest.raises(RuntimeFault, match=r"Hugging Face \+ PEFT: attention in .* did not end within 0 s"):
        unasked.choose_dtype()


def test_a_checkpoint_keeps_its_layers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run("bench", "train", "--model", str(tmp_path), "--layers", "2")
    assert done.returncode != 0 and "--layers is for presets" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "asked", "chosen"),
    [
        ({32: {"bfloat16": 8.0, "float32": 1.0}}, [32, 32], "float32"),
        (
            {32: {"bfloat16": 1.0, "float32": 0.9}, 100: {"bfloat16": 1.0, "float32": 3.0}},
            [32, 32, 100, 100],
            "bfloat16",
        ),
    ],
)
def test_a_whole_sequence_chooses_the_peers_dtype_where_a_short_one_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, dict[str, float]], asked: list[int], chosen: str
) -> None:
    made = peer.Peer(Plan(tokens=100), Path("none"), np.zeros((2, 100), dtype=np.int64), lambda line: None)
    tokens: list[int] = []

    def ask(targets: str, activations: str, dtype: str, some: Any, *rest: Any) -> dict[str, Any]:
        tokens.append(some.shape[1])
        return {"seconds": [9.0, seconds[some.shape[1]][dtype]]}

    monkeypatch.setattr(made, "_ask", ask)
    made.choose_dtype()
    assert tokens == asked
    assert made.dtype == chosen
    assert made.probe_tokens == asked[-1]


def test_a_report_becomes_a_measurement(result: dict[str, Any], recorded: Recorded) -> None:
    made = recorded(result)
    for row, wanted in zip(made.tables[0].rows, result["rows"], strict=True):
        assert row.case == ["tiny-qwen3-moe", wanted["targets"], wanted["activations"]]
        assert float(str(row.figures[0])) == pytest.approx(wanted["tokens_per_s"], rel=1e-3)
        assert float(str(row.figures[3])) == pytest.approx(wanted["peak_bytes"] / 1e9, rel=1e-3)
