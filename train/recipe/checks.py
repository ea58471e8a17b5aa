"""Allowed values of single keys. A check takes the document's value and returns the recipe's value, or raises
ValueError with the allowed values. Checks take `plain` values only, without line numbers."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Check = Callable[[Any], Any]

TRACKERS = {name: name for name in ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")}
"""Trackers for `report_to`: the package to import, which has the same name for pip."""

_WORDS = {"yes": True, "on": True, "no": False, "off": False}


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text{'' if value is None or value == '' else ', in quotes'}")
    if "\0" in value or not _encodable(value):
        raise ValueError("must be text without NUL and halves of surrogate pairs")
    return value


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def path(value: Any) -> Path:
    return Path(text(value))


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.casefold() in _WORDS:
        return _WORDS[value.casefold()]
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def whole(least: int, most: int | None = None) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
            raise ValueError(f"must be a whole number of at least {least}" + (f" and at most {most}" if most else ""))
        return value

    return check


def number(least: float = -math.inf, below: float = math.inf, *, above: bool = False, upto: float = math.inf) -> Check:
    """`least` and `upto` are inclusive bounds (with `above`, `least` is exclusive), `below` is an exclusive one.
    Accepts numbers in quotes."""
    bounds = [f"{'above' if above else 'of at least'} {least:g}"] * (least > -math.inf)
    bounds += [f"below {below:g}"] * (below < math.inf) + [f"at most {upto:g}"] * (upto < math.inf)
    allowed = f"must be a finite number {' and '.join(bounds)}".rstrip()

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(allowed)
        try:
            result = float(value) if not isinstance(value, str) or "_" not in value else math.nan
        except (ValueError, OverflowError):
            raise ValueError(allowed) from None
        if not math.isfinite(result) or result < least or result >= below or result > upto:
            raise ValueError(allowed)
        if above and result == least:
            raise ValueError(allowed)
        return result

    return check


def one_of(*names: str, why: dict[str, str] | None = None) -> Check:
    """`why`: names that are known but refused, with the reason and the alternative."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in (why or {}):
            raise ValueError((why or {})[value])
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"must be one of {', '.join(names)}{nearest(value, names)}")
        return value

    return check


def nearest(value: Any, names: tuple[str, ...] | list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(str(value)[:80], names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def names(value: Any) -> tuple[str, ...]:
    """A list of names, or one text with names separated by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be names separated by commas")
    stripped = [part.strip() for part in parts]
    if not all(stripped):
        raise ValueError("must be names separated by commas; one of them is empty")
    if len(set(stripped)) != len(stripped):
        raise ValueError("contains a name twice")
    return tuple(text(part) for part in stripped)


def one_adapter(value: Any) -> Path:
    listed = names(value)
    if len(listed) > 1:
        raise ValueError("more than one adapter would be merged into weights that are shared; name one")
    return Path(listed[0])


def numbers(value: Any) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise ValueError("must be numbers separated by commas")
    return tuple(number(0, above=True)(part) for part in parts)


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def mapping(value: Any) -> dict[str, Any]:
    """A mapping, or a mapping as JSON text, for the command line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be a mapping, or one as JSON text") from None
    if not isinstance(value, dict):
        raise ValueError("must be a mapping")
    return value


def warmup(value: Any) -> int | float:
    """A number of steps or, below 1, a share of all steps, as in transformers 5."""
    result = number(0)(value)
    if result >= 1 and result != int(result):
        raise ValueError("must be a whole number of steps, or a share of them below 1")
    return int(result) if result >= 1 or result == 0 else result


def steps(value: Any) -> int | float:
    """A number of steps or, below 1, a share of all steps, as in transformers."""
    allowed = "must be a whole number of steps of at least 1, or a share of all steps below 1"
    try:
        result = number(0, above=True)(value)
    except ValueError:
        raise ValueError(allowed) from None
    if result >= 1 and result != int(result):
        raise ValueError(allowed)
    return int(result) if result >= 1 else result


def validation_size(value: Any) -> float:
    result = number(0)(value)
    if result >= 1 and result != int(result):
        raise ValueError("must be a share below 1 or a whole number of rows")
    return result


def resume(value: Any) -> bool | Path | None:
    if isinstance(value, bool) or value is None:
        return value
    return path(value)


def dataset_directory(value: Any) -> Path:
    if isinstance(value, str) and (value == "ONLINE" or value.startswith("REMOTE:")):
        raise ValueError("datasets are read from this machine only: download it and name its directory")
    return path(value)


def trackers(value: Any) -> tuple[str, ...]:
    """`report_to`: none, all (installed ones), or names, each of an installed package."""
    if value is None or value in ("none", [], ["none"]):
        return ()
    listed = names(value)
    if "none" in listed:
        raise ValueError("none can't stand beside other names")
    if listed == ("all",):
        return tuple(name for name in TRACKERS if _installed(name))
    for name in listed:
        if name not in TRACKERS:
            known = ("none", *TRACKERS)
            raise ValueError(f"{name} is not among {', '.join(known)}{nearest(name, known)}")
        if not _installed(name):
            raise ValueError(f"the Python package {name} is not installed: pip install {TRACKERS[name]}")
    return listed


BUILT_IN_REWARDS = ("exact_match", "contains", "contains_any_case", "regex", "math")


def reward(value: Any) -> str:
    """`reward`: a built-in name, or FILE.py:FUNCTION. The file is looked up and read by `constraints`."""
    asked = text(value)
    if asked == "math" and not _installed("math_verify"):
        raise ValueError("the Python package math-verify is not installed: pip install 'kt-runtime[rl]'")
    if asked in BUILT_IN_REWARDS:
        return asked
    file, colon, function = asked.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        known = ", ".join(BUILT_IN_REWARDS)
        raise ValueError(f"must be one of {known}, or FILE.py:FUNCTION{nearest(value, list(BUILT_IN_REWARDS))}")
    return asked


def pattern(value: Any) -> str:
    import re

    asked = text(value)
    try:
        re.compile(asked)
    except re.error as error:
        raise ValueError(f"is no regular expression of Python: {error}") from None
    return asked


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def adapter_name(value: Any) -> str:
    from kt_runtime.adapters.paths import check_adapter_name

    return check_adapter_name(text(value))  # an InvalidValueError is a ValueError
