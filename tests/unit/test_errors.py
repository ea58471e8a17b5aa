from __future__ import annotations

import builtins
import inspect
import re

import pytest

from kt_runtime import errors
from kt_runtime.errors import KtError, RuntimeFault, UnknownNameError, UserError, suggestion

CLASSES: list[type[KtError]] = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, KtError)
]
LEAVES = [cls for cls in CLASSES if cls not in (KtError, UserError, RuntimeFault)]


@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_every_class_stands_in_the_documented_tree(cls: type[KtError]) -> None:
    assert errors.__doc__ is not None
    assert re.search(rf"\b{cls.__name__}\b", errors.__doc__)


@pytest.mark.parametrize("cls", LEAVES, ids=[cls.__name__ for cls in LEAVES])
def test_every_leaf_is_the_users_or_ours_and_also_the_standard_type_that_the_tree_names(cls: type[KtError]) -> None:
    assert issubclass(cls, UserError) != issubclass(cls, RuntimeFault)
    line = next(line for line in str(errors.__doc__).splitlines() if re.search(rf"\b{cls.__name__}\b", line))
    standard = re.search(r"also an? (\w+)", line)
    assert standard is not None
    assert issubclass(cls, getattr(builtins, standard[1]))


def test_exit_status_tells_the_users_mistake_from_ours() -> None:
    assert {cls.exit_status for cls in CLASSES if issubclass(cls, UserError)} == {2}
    assert {cls.exit_status for cls in CLASSES if not issubclass(cls, UserError)} == {1}


def test_an_unknown_name_shows_the_nearest_and_the_known_ones() -> None:
    error = UnknownNameError("preset", "tiny-qwen", ["tiny-qwen3-moe", "DeepSeek-V3-bf16"], where="--model")
    assert str(error) == (
        "--model: unknown preset 'tiny-qwen'; did you mean 'tiny-qwen3-moe'? known: DeepSeek-V3-bf16, tiny-qwen3-moe"
    )
    assert (error.kind, error.name, error.known) == ("preset", "tiny-qwen", ["DeepSeek-V3-bf16", "tiny-qwen3-moe"])


def test_a_name_near_to_none_shows_the_known_ones_only() -> None:
    assert str(UnknownNameError("loss", "zzz", ["dpo"])) == "unknown loss 'zzz'; known: dpo"
    assert str(UnknownNameError("session", "s", [])) == "unknown session 's'; known: none"


def test_many_known_names_are_shortened() -> None:
    text = suggestion("x", [f"name{number:02}" for number in range(30)])
    assert "name19, ... (30 in all)" in text
    assert "name20" not in text
