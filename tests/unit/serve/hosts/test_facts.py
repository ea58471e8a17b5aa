"""What hosts compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_runtime import __version__
from kt_runtime.serve.hosts.facts import CLOCK_SECONDS, clock_problem, described, differences, facts_of
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.version import PINNED


def facts(model: Path, **given: Any) -> dict[str, str]:
    return facts_of(replace(ServeOptions(model=str(model), tp_size=2, nnodes=2), **given), resolve_model(model))


def test_versions_weights_and_options_are_stated(model: Path) -> None:
    found = facts(model)
    assert (found["kt-runtime"], found["sglang"]) == (__version__, PINNED)
    assert len(found["weights of the checkpoint"]) == 64 and found["--tp-size"] == "2"
    assert differences(found, {"host 1": facts(model)}) == []


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"dtype": "float32"}, "--dtype: host 0 has bfloat16, host 1 has float32"),
        ({"tp_size": 4}, "--tp-size: host 0 has 2, host 1 has 4"),
        ({"nnodes": 4}, "--nnodes: host 0 has 2, host 1 has 4"),
        ({"max_lora_rank": 8}, "--max-lora-rank: host 0 has 64, host 1 has 8"),
        ({"expert_format": "int8"}, "--expert-format: host 0 has none, host 1 has int8"),
        ({"context_tokens": 99}, "--context-tokens: host 0 has none, host 1 has 99"),
        ({"no_step": True}, "--no-step: host 0 has False, host 1 has True"),
        ({"expert_isa": "portable"}, "instruction set (--expert-isa): host 0 has "),
        ({"passed_on": ("--page-size", "8")}, "options of SGLang's: host 0 has none, host 1 has --page-size 8"),
    ],
)
def test_an_option_that_differs_is_named_with_both_values(model: Path, given: dict[str, Any], line: str) -> None:
    (found,) = differences(facts(model), {"host 1": facts(model, **given)})
    assert found.startswith(line)


@pytest.mark.parametrize(
    "given",
    [
        {"node_rank": 1},
        {"host": "0.0.0.0", "port": 1234, "allow_no_key": True},
        {"expert_threads": 3, "adapter_dir": Path("/elsewhere"), "verbose": True},
    ],
)
def test_options_of_one_host_may_differ(model: Path, given: dict[str, Any]) -> None:
    assert differences(facts(model), {"host 1": facts(model, **given)}) == []


def test_a_fact_that_only_one_host_knows_is_a_difference() -> None:
    assert differences({"a": "1"}, {"host 1": {"a": "1", "b": "2"}}) == ["b: host 0 has not stated, host 1 has 2"]
    assert described(["x", "y"]) == "the hosts differ, so nothing is loaded: x; y"


def test_clocks_that_are_too_far_apart_are_named_with_both_times() -> None:
    assert clock_problem("host 1", 1000.0, 1000.0 - CLOCK_SECONDS) is None
    assert clock_problem("host 1", 1_000_000_000.0, 1_000_000_061.5) == (
        "clock: host 0 has 2001-09-09 01:46:40 UTC, host 1 has 2001-09-09 01:47:41 UTC, 61.5 s apart; allowed are 5 s"
    )
