"""The known log-probabilities of the reference: two sums for each pair, and their form in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.stages.objective import Row

REFERENCE: Final = "reference"
EVALUATION: Final = "evaluation_reference"
EVALUATION_ROWS: Final = "evaluation_rows"
DIGEST_BYTES: Final = 32

Values = npt.NDArray[np.float32]


class ReferenceValues:
    """float32 [pairs, 2], chosen and rejected, NaN while unknown: first the run's pairs in the order of `train`, then
    others in the order of their first use. A pair is identified by its id, not its content."""

    def __init__(self, train: Sequence[Row]) -> None:
        self._num_train = len(train)
        self._rows = list(train)  # keeps the pairs alive, so that their ids stay unique
        self._index = {id(pair): index for index, pair in enumerate(train)}
        self._values = np.full((len(train), 2), np.nan, np.float32)
        self._saved: dict[bytes, Values] = {}

    def of(self, rows: Sequence[Row]) -> Values:
        """The rows' values, float32 [rows, 2]."""
        places = self._places(rows)
        return self._values[places]

    def put(self, rows: Sequence[Row], values: Values) -> None:
        """`values`: float32 [rows, 2]."""
        places = self._places(rows)
        self._values[places] = values

    def missing(self, rows: Iterable[Row]) -> list[Row]:
        """The rows without values, each once, in order."""
        each = list({id(row): row for row in rows}.values())
        is_missing = np.isnan(self.of(each)).any(axis=1)
        return [each[index] for index in np.flatnonzero(is_missing)]

    def state(self, *, evaluation: bool) -> dict[str, Any]:
        """Arrays for a checkpoint. `evaluation`: includes the other pairs' values, keyed by content digests."""
        arrays: dict[str, Any] = {REFERENCE: self._values[: self._num_train].copy()}
        others = self._values[self._num_train :]
        if evaluation and len(others):
            digests = b"".join(map(_digest, self._rows[self._num_train :]))
            arrays[EVALUATION] = others.copy()
            arrays[EVALUATION_ROWS] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES).copy()
        return arrays

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Raises InvalidValueError if the checkpoint has another number of pairs than the run."""
        saved = arrays.get(REFERENCE)
        if saved is None:
            return
        if saved.shape != (self._num_train, 2) or saved.dtype != np.float32:
            raise InvalidValueError(
                f"reference log-probabilities of the checkpoint are {saved.dtype} {list(saved.shape)}; this run needs "
                f"float32 [{self._num_train}, 2]"
            )
        self._values[: self._num_train] = saved
        if EVALUATION in arrays:
            keys = [row.tobytes() for row in arrays[EVALUATION_ROWS]]
            self._saved = dict(zip(keys, arrays[EVALUATION], strict=True))

    def _places(self, rows: Sequence[Row]) -> list[int]:
        new = list({id(row): row for row in rows if id(row) not in self._index}.values())
        if new:
            unknown = np.full(2, np.nan, np.float32)
            values = [self._saved.get(_digest(row), unknown) if self._saved else unknown for row in new]
            for row in new:
                self._index[id(row)] = len(self._rows)
                self._rows.append(row)
            self._values = np.concatenate((self._values, np.stack(values)))
        return [self._index[id(row)] for row in rows]


def _digest(row: Row) -> bytes:
    digest = hashlib.sha256()
    for part in row.contents():
        digest.update(part)
    return digest.digest()
