"""Rows of parquet and arrow files, read batch by batch: one batch bounds the memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_runtime.errors import InvalidValueError

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 1024


def rows(file: Path, columns: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, "file: row N"), N from 1. Only the columns in `columns`, or all if the file has none of these."""
    number = 0
    with _named_errors(file):
        batches = _parquet(file, columns) if file.suffix.lower() == ".parquet" else _arrow(file, columns)
    while True:
        with _named_errors(file):
            batch = next(batches, None)
            if batch is None:
                break
            batch.validate(full=True)  # otherwise damaged offsets would be read beyond their buffer
            values = batch.to_pylist()
        for row in values:
            number += 1
            yield row, f"{file}: row {number}"


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        kind = file.suffix.lower()[1:]
        problem = str(error).strip().splitlines()
        raise InvalidValueError(f"{file}: cannot be read as {kind}: {problem[0] if problem else error!r}") from None


def _parquet(file: Path, columns: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    return table.iter_batches(batch_size=BATCH_ROWS, columns=_wanted(table.schema_arrow.names, columns))


def _arrow(file: Path, columns: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    """Accepts the IPC file with its footer, and the IPC stream that Hugging Face's datasets write."""
    import pyarrow

    source = pyarrow.memory_map(str(file))
    try:
        reader = pyarrow.ipc.open_file(source)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid:
        source.seek(0)
        reader = pyarrow.ipc.open_stream(source)
        batches = iter(reader)
    wanted = _wanted(reader.schema.names, columns)
    return (
        part.select(wanted).slice(start, BATCH_ROWS)
        for part in batches
        for start in range(0, part.num_rows, BATCH_ROWS)
    )


def _wanted(present: list[str], columns: Collection[str]) -> list[str]:
    return [name for name in present if name in columns] or present
