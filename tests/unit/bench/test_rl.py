"""What `bench rl` asks for, and its figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kt_runtime.bench.page.report import measurement_of, parse_report
from kt_runtime.bench.rl.plan import GROUP, Plan, prompts_of, recipe_of
from kt_runtime.bench.rl.report import print_report
from kt_runtime.bench.rl.run import figures
from kt_runtime.bench.rl.server_side import PARTS, Measured
from kt_runtime.errors import InvalidValueError, UnknownNameError


def measured() -> Measured:
    steps = [dict(zip(PARTS, values, strict=True)) for values in ([4, 4, 1, 0.5, 0.5], [6, 2, 1, 0.5, 0.5])]
    return Measured([*steps, dict.fromkeys(PARTS, 4.0)], 0.0, [20.0], [30.0, 50.0, 40.0], [10.0, 20.0], [60.0, 80.0])


def report() -> dict[str, Any]:
    machine = {"cpu": "a CPU", "processors": 2, "kt_runtime": "0"}
    return {"machine": machine, "rl": Plan().facts() | {"dtype": "bfloat16"}} | figures(measured())


def test_figures_are_medians_and_shares_those_of_all_steps() -> None:
    made = figures(measured())
    assert made["step_s"] == 10 and made["step_s_min"] == 10
    assert made["share"]["rollout"] == pytest.approx(14 / 40, abs=1e-15)
    assert sum(made["share"].values()) == pytest.approx(1, abs=1e-15) and list(made["share"]) == list(PARTS)
    assert (made["publish_to_first_token_ms"], made["publish_to_first_token_ms_min"]) == (40, 30)
    assert made["group_speedup"] == 5 and made["decode_step_ms"] == pytest.approx(1e3 / 15, abs=1e-12)


def test_a_step_has_prompts_of_its_own() -> None:
    plan = Plan(prompts=3, steps=2, prompt_tokens=5)
    prompts = prompts_of(plan, 90)
    assert len({row.ids.tobytes() for row in prompts}) == 9 and all(row.num_tokens == 5 for row in prompts)
    assert recipe_of(plan, None).rows_per_step == 3  # type: ignore[arg-type]
    assert plan.pool_tokens >= GROUP * plan.context_tokens


@pytest.mark.parametrize("name", ["prompts", "generations", "steps", "rounds", "rank", "new_tokens"])
def test_a_senseless_size_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"--{name.replace('_', '-')} is 0"):
        Plan(**{name: 0})  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="int8"):
        Plan(dtype="int8")


def test_a_report_becomes_a_measurement_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    origin = {"title": "t", "date": "2026-11-24", "machine": "m", "hardware": "h", "command": "c", "commit": "abc"}
    made = measurement_of(parse_report(json.dumps(report()).encode(), "report"), **origin)
    found = {single.what: single.value for single in made.figures}
    assert made.kind == "rl" and str(found["group / single, median"]) == "5"
    assert str(found["share of a step: rollout"]) == "0.3500"
    print_report(report())
    assert "5.00x" in capsys.readouterr().out
