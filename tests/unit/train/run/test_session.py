"""What a run asks of the resident before it begins, and what it says about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference.resident.counting_resident import CountingResident

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.run_identity import all_settings, identity, settings
from kt_runtime.train.run.session import lora_settings, open_session, session_name


def test_one_output_directory_has_one_session_name_that_the_wire_takes(tmp_path: Path) -> None:
    name = session_name(tmp_path / "a b/ö")
    assert name == session_name(tmp_path / "x" / ".." / "a b" / "ö") != session_name(tmp_path / "ö")
    assert session_name(Path("---")).startswith("run-") and len(session_name(Path("x" * 200))) < 128


def test_preference_training_has_no_dropout_and_says_so(
    resident: CountingResident, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    said: list[str] = []
    recipe = make_recipe(stage="dpo", lora_dropout=0.1, use_rslora=True, lora_rank=4, adapter_name_or_path=tmp_path)
    open_session(resident, "s", recipe, said.append)
    _, lora, start_from, reference = resident.log[0]
    assert lora == lora_settings(recipe) and lora.dropout == 0.0 and lora.alpha == 8 * math.sqrt(4)
    assert start_from == reference == str(tmp_path)
    assert any("lora_dropout: 0.1: not used" in line for line in said)
    sft = dataclasses.replace(recipe, stage="sft")
    assert lora_settings(sft).dropout == 0.1


def test_what_must_not_and_what_may_change_between_runs(make_recipe: Callable[..., Recipe]) -> None:
    class Rows:
        train = (1, 2)
        digest = "d" * 64

    recipe = make_recipe(stage="dpo", ref_model_adapters=Path("a"), lr_scheduler_kwargs={"num_cycles": 1})
    fixed: Any = identity(recipe, Rows(), "base")  # type: ignore[arg-type]
    assert fixed["ref_model_adapters"] == "a" and fixed["lora_target"] == ["all"] and fixed["model"] == "base"
    assert "pref_beta" not in identity(make_recipe(), Rows(), "base")  # type: ignore[arg-type]
    assert settings(recipe)["lr_scheduler_kwargs"] == {"num_cycles": 1}
    assert not set(fixed) & set(settings(recipe))
    assert all_settings(recipe)["output_dir"] == str(recipe.output_dir) and "places" not in all_settings(recipe)
