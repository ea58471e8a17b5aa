"""A bench's own JSON becomes a measurement. tests/system/bench does the same with reports of real runs."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.bench.page.measurement import Range, read_all
from kt_runtime.bench.page.report import measurement_of, parse_report
from kt_runtime.cli.main import main
from kt_runtime.errors import InvalidValueError

ORIGIN = {"title": "It", "date": "2026-01-31", "machine": "here", "hardware": "x", "command": "y", "commit": "abc1234"}


def training_report() -> dict[str, Any]:
    row = {
        "targets": "attention",
        "activations": "retain",
        "tokens_per_s": 123.456789,
        "hf_peft_tokens_per_s": None,
        "ratio": None,
        "peak_bytes": 8_349_999_999,
        "hf_peft_peak_bytes": None,
    }
    settings = {"model": "bench", "sequences": 8, "tokens": 16384, "steps": 3, "rank": 8}
    return {"machine": {"cpu": "a processor", "processors": 2}, "training": settings, "rows": [row]}


def cache_report() -> dict[str, Any]:
    return {
        "cache": {"model": "bench", "dtype": "bfloat16", "tokens": 2048},
        "disk_read_ratio": 1.0416666,
        "disk_write_ratio": 0.5,
        "files": {"bytes_per_s": {"plain_read": 1_810_000_000, "plain_write": 912_345_678}},
        "ttft_ms": {"cold": 1710.4, "disk_after_restart": 126.25},
        "ttft_ms_samples": {"cold": [1710.4, 1649.02], "disk_after_restart": [126.25]},
        "cold_to_disk": 13.5478,
    }


def serving_report() -> dict[str, Any]:
    """One stream, which the native step computes, and eight streams, which hardly decoded at the same time."""
    one: dict[str, Any] = {
        "case": "decode", "streams": 1, "adapters": False, "tokens_per_s": 100.0, "tokens_per_s_runs": [99.0, 100.0],
        "limit_tokens_per_s": 160.0, "limit_share": 0.625, "problem": None,
        "step": {"ms": 7.0, "limit_share": 0.84216, "sampling_ms": 0.5, "rest_ms": 2.5},
        "peers": {"sglang_no_step": 40.0}, "same_tokens": {"sglang_no_step": 1.0},
    }  # fmt: skip
    nothing: dict[str, Any] = {"tokens_per_s": None, "tokens_per_s_runs": [], "limit_share": None, "step": None}
    eight = one | nothing | {"streams": 8, "peers": {}, "same_tokens": {}, "problem": "0 of 3 runs were measured"}
    settings = {"model": "bench", "dtype": "bfloat16", "prompt_tokens": 8, "new_tokens": 9, "runs": 3, "rank": 16}
    peers = {"sglang_no_step": {"step": "--no-step", "problem": None}}
    return {"machine": {"limits": None}, "serving": settings, "peers": peers, "rows": [one, eight]}


def scale_report() -> dict[str, Any]:
    """Two replicas, and two ranks of which one case misses its bar."""
    row: dict[str, Any] = {
        "streams": 1, "tokens_per_s": 70.0, "tokens_per_s_runs": [69.0, 70.0], "one_process_tokens_per_s": 100.0,
        "one_process_tokens_per_s_runs": [100.0, 101.0], "ratio": 0.7, "step_ms": 9.123456,
        "one_process_step_ms": None, "same_tokens": 1.0,
    }  # fmt: skip
    return {
        "scale": {"replicas": 2, "streams": 0, "adapter_bytes": 10_000_000, "dtype": "bfloat16"},
        "rounds": [{"publish_ms": 70.0, "first_token_ms": [80.0, 400.0]}],
        "last_first_token_ms": 400.0, "worst_last_first_token_ms": 400.0, "bar_ms": 1000.0, "within_bar": True,
        "requests_failed": 0,
        "ranks": {
            "ranks": 2, "model": "bench", "rows": [row, row | {"streams": 8, "ratio": 0.9}], "bar": 0.8,
            "memory": memory_of_ranks(),
        },
    }  # fmt: skip


def memory_of_ranks() -> dict[str, Any]:
    """One of two ranks misses the bar at the peak."""
    moments = ("loaded", "between_calls", "at_peak")
    less, more = (dict(zip(moments, values, strict=True)) for values in ((1.0, 1.1, 1.125), (1.05, 1.125, 1.25)))
    rows = [{"rank": rank, "of_weights": each, "of_weights_and_cache": less} for rank, each in enumerate((less, more))]
    bars = dict(zip(moments, (1.1, 1.15, 1.15), strict=True))
    return {"base_model": "tiny", "rows": rows, "of_weights": more, "of_weights_and_cache": less, "bars": bars}


def read(report: dict[str, Any]) -> dict[str, Any]:
    return parse_report(json.dumps(report).encode(), "report.json")


def test_figures_are_rounded_to_digits_that_mean_something() -> None:
    made = measurement_of(read(training_report()), **ORIGIN)
    assert made.kind == "training" and {each.what: each.value for each in made.figures}["tokens"] == 16384
    assert made.tables[0].rows[0].case == ["bench", "attention", "retain"]
    assert made.tables[0].rows[0].figures == [Decimal("123.5"), None, None, Decimal("8.350"), None]


def test_scale_has_replicas_and_ranks_and_its_misses() -> None:
    made = measurement_of(read(scale_report()), **ORIGIN)
    assert made.kind == "scale"
    assert {each.what: each.value for each in made.figures}["replicas of one registry"] == 2
    assert [row.case for row in made.tables[0].rows] == [["bench", "2", "1"], ["bench", "2", "8"]]
    ranks, one = Range(Decimal(69), Decimal(70)), Range(Decimal(100), Decimal(101))
    ratios = [Decimal("0.7000"), Decimal("9.123"), None, 1]
    assert made.tables[0].rows[0].figures == [70, ranks, 100, one, *ratios]
    memory = made.tables[1]
    assert [column.name for column in memory.columns][:3] == [
        *("loaded, of weights", "loaded, of weights and KV cache", "between calls, of weights"),
    ]
    assert memory.rows[1].case == ["bench", "1"]
    assert memory.rows[1].figures == [Decimal(each) for each in ("1.050", "1", "1.125", "1.100", "1.250", "1.125")]
    assert made.misses == [
        "2 ranks, 1 streams: 0.7000 of one process, at least 0.8 is wanted.",
        "2 ranks, memory at peak: 1.250 of the weights, at most 1.15 is wanted.",
    ]
    alone = {name: value for name, value in scale_report().items() if name in ("scale", "ranks")}
    assert measurement_of(read(alone), **ORIGIN).figures == []


def test_first_tokens_have_their_range_over_the_rounds() -> None:
    made = measurement_of(read(cache_report()), **ORIGIN)
    assert {each.what: str(each.value) for each in made.figures} == {
        "prefix": "2048",
        "disk tier over a plain file: reading": "1.042",
        "disk tier over a plain file: writing": "0.5000",
        "reading a plain file": "1.810",
        "writing a plain file": "0.9123",
        "cold / disk": "13.55",
    }
    assert made.tables[0].rows[0].figures == [Decimal("1710"), Range(Decimal("1649"), Decimal("1710"))]
    assert made.tables[0].rows[1].case == ["disk after restart"]


def test_serving_says_what_the_step_takes_and_what_was_not_measured() -> None:
    made = measurement_of(read(serving_report()), **ORIGIN)
    figures = {each.what: (str(each.value), each.unit) for each in made.figures}
    assert figures["the native step without HTTP, 1 stream, per token"] == ("7", "ms")
    assert figures["the native step without HTTP, 1 stream: limit / time"] == ("0.8422", "ratio")
    assert figures["sampling, 1 stream, per token"] == ("0.5000", "ms")
    rest = "neither step nor sampling (head, scheduling, HTTP), 1 stream, per token"
    assert figures[rest] == ("2.500", "ms")
    table = made.tables[0]
    names = [column.name for column in table.columns]
    first, second = (dict(zip(names, row.figures, strict=True)) for row in table.rows)
    assert first["SGLang without the step"] == 40 and first["kt-runtime / SGLang without the step"] == Decimal("2.500")
    assert {name: cell for name, cell in second.items() if cell is not None} == {"limit": 160}
    assert [row.note for row in table.rows] == [None, "0 of 3 runs were measured"]
    assert table.notes == ["SGLang without the step: step --no-step."]


def test_serving_in_one_row_by_model_and_format() -> None:
    """The bench preset has 1,241,803,264 parameters; of a GGUF file the bytes of the file count."""
    report = serving_report()
    report["serving"]["model"] = "bench-qwen3-moe"
    report["rows"][0]["peers"]["llama_cpp"] = 80.0
    row = measurement_of(read(report), **ORIGIN).tables[1].rows[0]
    assert row.case == ["bench-qwen3-moe", "bfloat16"]
    assert row.figures == [Decimal("2.484"), None, 100, None, [None, Decimal("1.250"), None]]
    report["serving"]["gguf"] = {"mix": "Q4_K_M", "bytes": 753852832}
    row = measurement_of(read(report), **ORIGIN).tables[1].rows[0]
    assert row.case == ["bench-qwen3-moe", "Q4_K_M"] and row.figures[0] == Decimal("0.7539")


def test_a_report_of_serving_without_the_newer_fields_is_read() -> None:
    report = serving_report()
    report["rows"], report["peers"] = report["rows"][:1], {}
    for row in report["rows"]:
        del row["step"], row["problem"]
        row["peers"], row["same_tokens"] = {}, {}
    made = measurement_of(read(report), **ORIGIN)
    assert len(made.figures) == 4 and made.tables[0].rows[0].note is None
    assert made.tables[0].rows[0].figures[0] == 100


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "report.json: Expecting"),
        ("[]", "holds no JSON object"),
        (
            '{"rows": []}',
            "has the fields rows; .* of loads, training, rl, interfere, swap, scale, serving, cache, gpu, publish",
        ),
        ('{"training": {}, "rows": []}', "bench training`: lacks the field 'sequences'"),
    ],
)
def test_json_that_is_no_report_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        measurement_of(parse_report(text.encode(), "report.json"), **ORIGIN)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without measurements."""
    (tmp_path / "docs" / "measurements").mkdir(parents=True)
    (tmp_path / "docs" / "pictures").mkdir()
    page: dict[str, Any] = {"introduction": [], "sections": {}}
    frame = {"measurements": page | {"sections": {"training": "Training"}}, "performance": page, "not_measured": []}
    (tmp_path / "docs" / "measurements" / "page.json").write_text(json.dumps(frame))
    (tmp_path / "README.md").write_text("<!-- measured: new#steps -->\n<!-- end of measured -->\n")
    timeline = {"model": "m", "before": "a", "after": "b", "optim_finished_s": 1.0, "first_token_s": 1.2, "steps": []}
    (tmp_path / "docs" / "pictures" / "demo.json").write_text(
        json.dumps(timeline | {"streams": [[0, 0.0, 2.0, False]]})
    )
    (tmp_path / "report.json").write_text(json.dumps(training_report()))
    return tmp_path


def record(checkout: Path, **options: str) -> int:
    named = {"name": "new", "title": "New", "command": "kt-runtime bench train", "commit": "abc1234", "machine": "here"}
    arguments = [part for option, value in (named | options).items() for part in (f"--{option}", value)]
    return main(["bench", "record", str(checkout / "report.json"), "--checkout", str(checkout), *arguments])


def test_one_command_adds_a_report_and_generates_the_page(checkout: Path) -> None:
    assert record(checkout, date="2026-01-31") == 0
    made = read_all(checkout / "docs" / "measurements")["new"]
    assert (made.date, made.hardware) == ("2026-01-31", "2 processors of a processor")
    for page in ("README.md", "docs/measurements.md"):
        text = (checkout / page).read_text(encoding="utf-8")
        assert "| bench | attention | retain | 123.5 | - | - | 8.350 | - |" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "../new"}, "lower-case letters"),
        ({"date": "today"}, "new.json: .*date"),
        ({"title": ""}, "new.json: .*title"),
    ],
)
def test_a_report_with_a_wrong_origin_writes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], said: str
) -> None:
    before = sorted(checkout.rglob("*"))
    assert record(checkout, **options) == 2
    assert re.search(said, capsys.readouterr().err)
    assert sorted(checkout.rglob("*")) == before


def test_a_recorded_report_is_not_replaced(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(checkout) == 0
    assert record(checkout) != 0
    assert "exists already" in capsys.readouterr().err


def test_a_report_that_names_no_machine_needs_one(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = training_report()
    del report["machine"]
    (checkout / "report.json").write_text(json.dumps(report))
    assert record(checkout) == 2
    assert "--hardware" in capsys.readouterr().err
    assert record(checkout, hardware="two cores") == 0
