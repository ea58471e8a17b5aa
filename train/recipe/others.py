"""The keys of other programs: `configs/recipe_keys.yaml`, read once, with the names and types of its fields.

A mistake in the file is ours, not a user's: decoding it raises msgspec.ValidationError, and tests compare its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import msgspec

from kt_runtime.train.recipe import checks
from kt_runtime.train.recipe.checks import Check


class Allowed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allowed values: of a `type` with inclusive (`at_least`, `at_most`) or exclusive bounds, or `one_of` these names.

    Neither: any value. `or_null`: null, too. `refused_values`: names that are known, with the reason of their refusal.
    """

    type: Literal["text", "truth", "mapping", "whole", "number"] | None = None
    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    one_of: tuple[str, ...] = ()
    or_null: bool = False
    refused_values: dict[str, str] = {}

    @property
    def check(self) -> Check:
        check = self._check()
        return checks.optional(check) if self.or_null else check

    def _check(self) -> Check:
        if self.one_of:
            return checks.one_of(*self.one_of, why=self.refused_values)
        if self.type == "whole":
            return checks.whole(int(self.at_least))
        if self.type == "number":
            least = max(self.at_least, self.above)
            return checks.number(least, self.below, above=self.above > -math.inf, upto=self.at_most)
        return {"text": checks.text, "truth": checks.truth, "mapping": checks.mapping, None: _any}[self.type]


class Alias(Allowed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`line`: what the key means, for the documentation."""

    line: str


class KtField(Allowed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A field of kt_config. `line`: what the field means, or why it is refused or has no effect. `sets`: the recipe key
    that the field repeats. `passes`: the value with which a refused field passes, besides null."""

    kind: Literal["alias", "refused", "warned"]
    line: str = ""
    sets: str | None = None
    passes: Any = None


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys with one reason, and each key's default."""

    reason: str | None
    keys: dict[str, Any]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    refused: list[_Group]
    warned: list[_Group]
    aliases: dict[str, Alias]
    refused_values: dict[str, dict[str, str]]
    grpo_elsewhere: dict[str, str]
    kt_config: dict[str, KtField]
    kt_config_internal: list[str]
    schedules: dict[str, dict[str, Allowed]]


class Known(NamedTuple):
    """A key that is refused or has no effect. `reason`: why; None: no message. `default` passes silently, like null."""

    reason: str | None
    default: Any

    @property
    def passing(self) -> tuple[Any, ...]:
        return (None, self.default)


def _any(value: Any) -> Any:
    return value


def _by_key(groups: list[_Group]) -> dict[str, Known]:
    return {key: Known(group.reason, default) for group in groups for key, default in group.keys.items()}


TABLE = msgspec.yaml.decode(files("kt_runtime").joinpath("configs", "recipe_keys.yaml").read_bytes(), type=_Table)
REFUSED: Mapping[str, Known] = _by_key(TABLE.refused)
WARNED: Mapping[str, Known] = _by_key(TABLE.warned)
