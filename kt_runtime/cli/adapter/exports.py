"""The export formats of an adapter: a PEFT directory, a merged checkpoint, a GGUF file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kt_runtime.adapters import not_applied, readers, without_fillers, write_gguf_adapter, write_peft_directory
from kt_runtime.adapters.peft_directory import CONFIG_FILE, TENSOR_FILE
from kt_runtime.cli.adapter.export_record import RECORD_FILE, check_replaced, record_of
from kt_runtime.cli.adapter.merged_checkpoint import write_merged
from kt_runtime.cli.adapter.place import MAX_RANK, ChosenAdapter
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.families.quantization import quantization_of
from kt_runtime.files import TEMPORARY_PREFIX, fsync_directory, move_directory
from kt_runtime.serve.memory.plan import format_bytes

GIGABYTE = 10**9
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Say = Callable[[str], None]


def export_adapter(
    chosen: ChosenAdapter,
    path: Path,
    form: str,
    say: Say,
    *,
    dtype: str | None = None,
    shard_gigabytes: float = 5.0,
    overwrite: bool = False,
) -> None:
    """Writes `path`; a failure leaves existing files unchanged. `say` prints one line per remark.

    `dtype`: None means the adapter's own for "peft", float32 for "gguf", the base's for "merged". `overwrite`: `path`
    may be an earlier export, which is replaced atomically. Raises UserErrors.
    """
    check_place(path, overwrite=overwrite)
    if path.is_dir() and path.samefile(chosen.base):
        raise ConflictError(f"{path} is the base model itself, which --overwrite does not replace; choose another name")
    for note in chosen.adapter.notes:
        say(note)
    write = partial(_WRITERS[form], chosen)
    settings = (say, _DTYPES[dtype] if dtype is not None else None, shard_gigabytes)
    if not os.path.lexists(path):
        write(path, *settings)
        return
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=path.parent) as directory:
        written = Path(directory) / path.name
        write(written, *settings)
        beside = Path(directory).with_name(f"{Path(directory).name}-new")
        written.rename(beside)
        if beside.is_dir():
            move_directory(beside, path)
        else:
            beside.replace(path)
            fsync_directory(path.parent)


def check_place(path: Path, *, overwrite: bool) -> None:
    """Raises ConflictError if `path` exists, unless it is an earlier export and `overwrite` is set."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise ConflictError(f"{path} exists already; choose another name, or pass --overwrite")
    check_replaced(path)


def _peft(
    chosen: ChosenAdapter, path: Path, say: Say, dtype: torch.dtype | None, _: float, *, fuses_experts: bool = True
) -> None:
    adapter = without_fillers(chosen.adapter)
    found = {tensor.dtype for pair in adapter.modules.values() for tensor in pair}
    own = found.pop() if len(found) == 1 else torch.float32
    write_peft_directory(
        path,
        adapter,
        chosen.family,
        chosen.config,
        max_rank=MAX_RANK,
        base_model=chosen.base_name,
        dtype=dtype or own,
        extra={RECORD_FILE: record_of((CONFIG_FILE, TENSOR_FILE))},
        fuses_experts=fuses_experts,
    )
    for reader in readers(path, chosen.config):
        say(str(reader))


def _sglang(chosen: ChosenAdapter, path: Path, say: Say, dtype: torch.dtype | None, shard_gigabytes: float) -> None:
    """A pair for each expert, also in a family whose experts PEFT has fused."""
    _peft(chosen, path, say, dtype, shard_gigabytes, fuses_experts=False)


def _gguf(chosen: ChosenAdapter, path: Path, say: Say, dtype: torch.dtype | None, _: float) -> None:
    write_gguf_adapter(
        path,
        chosen.adapter,
        chosen.family,
        chosen.config,
        max_rank=MAX_RANK,
        base_model=chosen.base_name,
        dtype=dtype or torch.float32,
    )
    if unused := not_applied(chosen.adapter, chosen.family):
        say(
            f"llama.cpp reads the parts for {', '.join(unused)}, but its {chosen.family.gguf_architecture} graph does "
            "not use them; what it answers is exact only with --format merged"
        )


def _merged(chosen: ChosenAdapter, path: Path, say: Say, dtype: torch.dtype | None, shard_gigabytes: float) -> None:
    if dtype == torch.float16:
        raise InvalidValueError("--dtype float16: a merged checkpoint is bfloat16 or float32")
    if not 0 < shard_gigabytes < math.inf:
        raise InvalidValueError(f"shard size {shard_gigabytes:g} GB: expected more than 0")
    if (quantization := quantization_of(chosen.config)) is not None:
        say(f"the base is quantized ({quantization.description}); the merged checkpoint is {_name(dtype)}")
    columns = (TextColumn("merging"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("merging", total=None)
        written_bytes = write_merged(
            chosen.base,
            chosen.adapter,
            path,
            shard_bytes=max(1, int(shard_gigabytes * GIGABYTE)),
            dtype=dtype,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    say(f"merged into {chosen.base_name}: {format_bytes(written_bytes)} of weights")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.bfloat16).removeprefix("torch.")


_WRITERS: dict[str, Callable[..., None]] = {"peft": _peft, "sglang": _sglang, "merged": _merged, "gguf": _gguf}
