"""One-dimensional arrays out of the tensors in a training call, in protobuf and in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.tinker.protocol.schema import FLOAT32, INT32, INT64

Array = npt.NDArray[Any]
DTYPES: dict[int, str] = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}
JSON_DTYPES = {"float32": np.float32, "int64": np.int64}


def token_array(data: bytes, where: str) -> npt.NDArray[np.int32]:
    """The token ids of a chunk, int32 [n]."""
    return _numbers(data, "<i4", where)


def array_of_message(tensor: Any, where: str) -> Array:
    """`tensor`: a protobuf `Tensor` of shape [n] or [n, 1]. Raises InvalidValueError with `where` for any other."""
    if tensor.dtype not in DTYPES:
        raise InvalidValueError(f"{where}: dtype {tensor.dtype}; allowed are 1 (float32), 2 (int64) and 3 (int32)")
    shape = list(tensor.shape)
    if tensor.HasField("sparse_csr"):
        return _from_csr(tensor, shape, where)
    return _flat(_numbers(tensor.dense, DTYPES[tensor.dtype], where), shape or None, where)


def array_of_json(data: Sequence[float], dtype: str, shape: Sequence[int] | None, where: str) -> Array:
    """As `array_of_message`, for the JSON form {"data", "dtype", "shape"}."""
    if dtype not in JSON_DTYPES:
        raise InvalidValueError(f"{where}: dtype {dtype!r}; allowed are {', '.join(JSON_DTYPES)}")
    try:
        with np.errstate(over="ignore"):  # infinity is refused later, with its place
            values: Array = np.array(data, JSON_DTYPES[dtype])
    except (OverflowError, ValueError, TypeError):
        raise InvalidValueError(f"{where}: a value that is no {dtype}") from None
    return _flat(values, None if shape is None else list(shape), where)


def _numbers(data: bytes, dtype: str, where: str) -> Array:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidValueError(f"{where}: {len(data)} bytes are no whole number of {size}-byte values")
    return np.frombuffer(data, dtype)


def _flat(values: Array, shape: list[int] | None, where: str) -> Array:
    if shape is None:
        return values
    _check_one_column(shape, where)
    if len(values) != shape[0]:
        raise InvalidValueError(f"{where}: {len(values)} values for shape {shape}")
    return values


def _check_one_column(shape: list[int], where: str) -> None:
    if len(shape) != 1 and not (len(shape) == 2 and shape[1] == 1):
        raise InvalidValueError(
            f"{where}: shape {shape[:8]}; allowed is one value a token, since this server trains one target a token"
        )


def _from_csr(tensor: Any, shape: list[int], where: str) -> Array:
    _check_one_column(shape, where)
    values = _numbers(tensor.sparse_csr.values, DTYPES[tensor.dtype], where)
    rows = _numbers(tensor.sparse_csr.crow_indices, "<i8", where)
    columns = _numbers(tensor.sparse_csr.col_indices, "<i8", where)
    counts = np.diff(rows)
    fits = len(rows) == shape[0] + 1 and len(values) == len(columns) and (columns == 0).all()
    if not fits or rows[0] != 0 or rows[-1] != len(values) or ((counts != 0) & (counts != 1)).any():
        raise InvalidValueError(f"{where}: its sparse indices do not describe a tensor of shape {shape}")
    dense: Array = np.zeros(shape[0], values.dtype)
    dense[counts == 1] = values
    return dense
