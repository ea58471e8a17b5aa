"""What the plans of all benchmarks check in the same way: bounds of their options, and the data type."""

from __future__ import annotations

from kt_runtime.errors import InvalidValueError, UnknownNameError

PRESET = "bench-qwen3-moe"
"""The model of every benchmark that is not told another one."""
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
DTYPES = tuple(DTYPE_BYTES)


def check_number(name: str, value: int, lowest: int = 1, highest: int | None = None, why: str = "") -> None:
    """Raises InvalidValueError. `name`: of the plan's field, which the option --NAME sets."""
    if value < lowest or (highest is not None and value > highest):
        allowed = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        reason = f": {why}" if why else ""
        raise InvalidValueError(f"--{name.replace('_', '-')} is {value}; must be {allowed}{reason}")


def check_dtype(dtype: str | None) -> None:
    """Raises UnknownNameError; None means that the benchmark chooses."""
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
