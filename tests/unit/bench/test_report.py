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


def read(report: dict[str, Any]) -> dict[str, Any]:
    return parse_report(json.dumps(report).encode(), "report.json")


def test_figures_are_rounded_to_digits_that_mean_something() -> None:
    made = measurement_of(read(training_report()), **ORIGIN)
    assert made.kind == "training" and {each.what: each.value for each in made.figures}["tokens"] == 16384
    assert made.tables[0].rows[0].case == ["bench", "attention", "retain"]
    assert made.tables[0].rows[0].figures == [Decimal("123.5"), None, None, Decimal("8.350"), None]


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "report.json: Expecting"),
        ("[]", "holds no JSON object"),
        ('{"rows": []}', "has the fields rows; .* one of loads, training, serving, cache, publish_ms"),
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
