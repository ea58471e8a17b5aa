"""The checklist of docs/adding-a-family.md: every family has every row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from reference.checkpoints.published import PUBLISHED
from reference.families import PRESETS
from reference.resident.native_step import CASES

from kt_runtime.families import FAMILIES, family_for
from kt_runtime.families.base import Family
from kt_runtime.serve.models.families import CHECKS, FORMAT_CHECKS
from kt_runtime.serve.models.names import SERVED
from kt_runtime.serve.models.presets import load_preset, preset_names

ROOT = Path(__file__).parents[4]
SYSTEM = ("tests/system/training/test_parity_of_training_and_serving.py", "tests/system/serving/test_families.py")


def text(path: str) -> str:
    return (ROOT / path).read_text()


def names_type(path: str) -> Callable[[Family], bool]:
    """Whether a file of tests has a configuration of the family."""
    return lambda family: any(f'"model_type": "{name}"' in text(path) for name in family.model_types)


def has_tiny_model(family: Family) -> bool:
    return family.name in PRESETS and family_for(PRESETS[family.name].config) is family


def is_compared_with_sglang_s_modules(family: Family) -> bool:
    return any(family_for(case[0].config) is family for case in CASES.values())


def has_a_server(family: Family) -> bool:
    names = (f'"{family.name}"', f'"tiny-{family.name.replace("_", "-")}"')
    return any(name in text(path) for path in SYSTEM for name in names)


def has_a_preset_of_the_hub(family: Family) -> bool:
    presets = [name for name in preset_names() if load_preset(name).hub_ids]
    return any(family_for(load_preset(name).config) is family for name in presets)


def has_published_names(family: Family) -> bool:
    return any(family_for(load_preset(name).config) is family for name in PUBLISHED)


def has_names_of_models(family: Family) -> bool:
    return any(family_for(load_preset(served.preset).config) is family for served in SERVED)


def has_rows_in_the_documentation(family: Family) -> bool:
    rows = [line for line in text("docs/models.md").splitlines() if line.startswith(f"| `{family.name}` |")]
    return len(rows) == 2 and "`kt-runtime serve " in rows[0]


CHECKLIST: dict[str, Callable[[Family], bool]] = {
    "served": has_tiny_model,
    "trained": has_tiny_model,
    "native step": is_compared_with_sglang_s_modules,
    "gradients": names_type("tests/reference/resident/configs.py"),
    "adapters": names_type("tests/unit/adapters/conftest.py"),
    "server": has_a_server,
    "names and shapes": names_type("tests/unit/families/conftest.py"),
    "preset of the hub": has_a_preset_of_the_hub,
    "published names": has_published_names,
    "names of its models": has_names_of_models,
    "documentation": has_rows_in_the_documentation,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("row", CHECKLIST)
def test_every_family_has_every_row(family: Family, row: str) -> None:
    assert CHECKLIST[row](family), f"docs/adding-a-family.md: {family.name} lacks {row!r}"


@pytest.mark.parametrize("row", CHECKLIST)
def test_the_checklist_sees_a_family_without_the_row(row: str) -> None:
    class Unknown(type(FAMILIES[0])):  # type: ignore[misc]
        name = "unknown"
        model_types = ("unknown",)

    assert not CHECKLIST[row](Unknown())


def test_what_is_said_to_be_verified_is_on_the_checklist() -> None:
    assert {check.name for check in CHECKS} <= CHECKLIST.keys()
    assert all((ROOT / check.tests).exists() for check in (*CHECKS, *FORMAT_CHECKS))
    steps = text("docs/adding-a-family.md")
    assert all(re.search(rf"\*\*{row}\*\*", steps, re.IGNORECASE) for row in CHECKLIST)
