from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kt_runtime.cli.models import format_count
from kt_runtime.families import FAMILIES
from kt_runtime.families.gguf import EXPERT_TYPES
from kt_runtime.families.quantization import METHODS
from kt_runtime.serve.models.families import CHECKS, FORMAT_CHECKS, family_rows
from kt_runtime.serve.models.presets import preset_names
from kt_runtime.serve.models.report import resolve_model

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_the_list_names_every_preset_in_full(run: Run) -> None:
    for columns in ("80", "160"):
        result = run("models", COLUMNS=columns)
        assert result.returncode == 0
        assert all(name in result.stdout for name in preset_names())
        assert all(family.name in result.stdout for family in FAMILIES)
        assert "fp8_e4m3_g128" in result.stdout and all(check.name in result.stdout for check in CHECKS)


def test_the_list_as_json_has_sizes_and_where_it_is(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    assert rows.keys() == set(preset_names())
    assert rows["DeepSeek-V3-bf16"]["family"] == "deepseek_v3"
    assert rows["DeepSeek-V3-bf16"]["parameters_total"] == 671_026_419_200
    assert rows["DeepSeek-V3-bf16"]["bf16_bytes"] == 2 * 671_026_419_200
    assert rows["DeepSeek-V3-bf16"]["weights_bytes"] == 2 * 671_026_419_200
    assert rows["DeepSeek-V3"]["weights_bytes"] == pytest.approx(653.9e9 + 2 * 17.1e9, rel=0.01)
    formats = {name: row["expert_format"] for name, row in rows.items()}
    assert (formats["Kimi-K2"], formats["Kimi-K2-Thinking"]) == ("fp8_e4m3_g128", "int4_g32")
    assert all(row["memory_bytes"] > row["weights_bytes"] for row in rows.values())
    shown = json.loads(run("models", "show", "Kimi-K2", "--json").stdout)
    assert rows["Kimi-K2"]["memory_bytes"] <= shown["memory_bytes"]  # whose rank is higher where there is memory
    assert {row["directory"] for row in rows.values()} == {None}


def test_a_made_model_is_where_its_name_finds_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = json.loads(run("models", "make", "tiny-qwen3-moe", "--json").stdout)
    assert made["directory"] == str(tmp_path / "models" / "tiny-qwen3-moe")
    rows = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    assert rows["tiny-qwen3-moe"]["directory"] == made["directory"]
    monkeypatch.setenv("KT_RUNTIME_MODELS", str(tmp_path / "models"))
    assert str(resolve_model("tiny-qwen3-moe").directory) == made["directory"]


def test_a_model_is_made_in_the_directory_given_once(run: Run, tmp_path: Path) -> None:
    assert run("models", "make", "tiny-deepseek-v3", "here", "--seed", "3").returncode == 0
    assert resolve_model(tmp_path / "here").family.name == "deepseek_v3"
    again = run("models", "make", "tiny-deepseek-v3", "here")
    assert again.returncode == 2 and "here exists already" in again.stderr
    assert run("models", "make", "tiny-deepseek-v3", "here", "--force").returncode == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("tiny-deepseek", "did you mean 'tiny-deepseek-v3'?"), ("Qwen3-30B-A3B", "has real weights, Qwen/Qwen3-30B-A3B")],
)
def test_only_made_presets_can_be_made(run: Run, name: str, reason: str) -> None:
    result = run("models", "make", name, "here")
    assert result.returncode == 2 and reason in result.stderr
    assert result.stdout == ""


def test_show_says_what_a_preset_needs(run: Run) -> None:
    details = json.loads(run("models", "show", "Kimi-K2", "--json").stdout)
    assert details["config"]["n_routed_experts"] == 384 and "fp8" in details["note"]
    assert details["memory_bytes"] == sum(need["size_bytes"] for need in details["memory"]) > 1.02e12
    assert details["directory"] is None and details["problem"] is None
    text = run("models", "show", "Kimi-K2").stdout
    assert "routed experts, packed" in text and "948 GiB" in text and "fp8_e4m3_g128" in text


def test_show_of_a_broken_directory_says_why_it_cant_be_used(run: Run, tmp_path: Path) -> None:
    run("models", "make", "tiny-qwen3-moe", "here")
    assert json.loads(run("models", "show", "./here", "--json").stdout)["problem"] is None
    (tmp_path / "here" / "tokenizer.json").unlink()
    assert "no tokenizer" in json.loads(run("models", "show", "./here", "--json").stdout)["problem"]


@pytest.mark.parametrize(
    ("count", "text"), [(931_088, "0.931M"), (1_241_803_264, "1.24B"), (671_026_419_200, "671B"), (1_026e9, "1.03T")]
)
def test_counts_are_shown_with_three_digits(count: int, text: str) -> None:
    assert format_count(count) == text


def test_every_method_and_type_is_in_the_list_of_formats(run: Run) -> None:
    rows = json.loads(run("models", "formats", "--json").stdout)
    methods = {row["method"] for row in rows}
    assert {method.removesuffix("_fp4") for method in METHODS} == {m.split()[0] for m in methods} - {"none", "GGUF"}
    assert {f"GGUF {kind}" for kind in EXPERT_TYPES} <= methods
    shown = run("models", "formats", COLUMNS="160").stdout
    assert all(row["experts"] in shown for row in rows[:1])
    assert all(check.claim[:30] in shown for check in FORMAT_CHECKS)


def test_the_families_are_listed_with_what_was_verified(run: Run) -> None:
    rows = json.loads(run("models", "families", "--json").stdout)
    assert rows == family_rows()
    assert [row["family"] for row in rows] == [family.name for family in FAMILIES]
    assert all(row["presets"] for row in rows)
    assert all(row["verified"].keys() == {check.name for check in CHECKS} for row in rows)
    shown = run("models", "families", COLUMNS="160").stdout
    assert all(family.name in shown for family in FAMILIES)
    assert all(check.claim[:30] in shown for check in CHECKS)
