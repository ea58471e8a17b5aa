"""A training session on disk: a standard PEFT directory, plus the state that resuming needs.

    adapter_config.json, adapter_model.safetensors    the masters in float32, as `kt_runtime.adapters` writes them
    session.json                                      `SavedSession`
    optimizer.safetensors                             AdamW's state, float32: NAME.lora_A.first, .second, .steps

The optimizer's state is optional. An accumulated gradient that no optimizer step has used is not saved. The directory
appears atomically. It may replace an earlier checkpoint: an empty directory, or one that holds only these files with a
readable session.json; any other directory is left unchanged. Loading checks everything before it changes anything.

The functions that access files (`check_target`, `write`, `read`) are slow and may run on a worker thread, while the
session runs nothing else. The functions that access the session are generators of slices.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import safetensors.torch
import torch

from kt_runtime.adapters import (
    AdapterTensors,
    complete_groups,
    content_hash,
    open_directory,
    read_peft_directory,
    read_tensors,
    write_peft_directory,
)
from kt_runtime.adapters.peft_directory import CONFIG_FILE, TENSOR_FILE
from kt_runtime.adapters.tensors import Contents
from kt_runtime.errors import AdapterError, ConflictError, InvalidValueError
from kt_runtime.families import Family, LoraModule
from kt_runtime.files import errors_of_path, only_files
from kt_runtime.resident.host import Host
from kt_runtime.resident.scheduler import Slice, Slices
from kt_runtime.resident.training.portions import portions
from kt_runtime.resident.training.session import Session
from kt_runtime.resident.training.session_limits import num_parameters
from kt_runtime.resident.twin.adapter_parts import AdapterParts
from kt_runtime.wire.messages import LoraSettings

SESSION_FILE = "session.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MAX_SESSION_BYTES = 1 << 20
_SAVED_FILES = only_files(
    re.compile("|".join(re.escape(name) for name in (CONFIG_FILE, TENSOR_FILE, SESSION_FILE, OPTIMIZER_FILE))),
    [CONFIG_FILE, TENSOR_FILE, SESSION_FILE],
    "`save`",
)
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
MAX_ADAM_STEPS = float(1 << 24)  # float32 can't count further


class SavedSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`step`, `calls`: the session's `step` and `num_calls`. `modules`: the trained modules, without fillers."""

    format: int = 1
    rank: int
    alpha: float
    step: Count
    calls: Count
    modules: list[str]
    has_optimizer: bool


@dataclass(frozen=True)
class Snapshot:
    """A copy of a session's state at one moment: training may continue while the copy is written. It is whole: a
    checkpoint does not depend on the number of ranks."""

    saved: SavedSession
    adapter: AdapterTensors
    optimizer: dict[str, torch.Tensor]


def checked_path(path: str) -> Path:
    """`path` as a Path. Raises InvalidValueError unless absolute: clients don't know the server's working directory."""
    if not path.startswith("/") or "\0" in path or ".." in Path(path).parts:
        raise InvalidValueError(f"path {path!r}: must be absolute, without '..'")
    return Path(path)


def snapshot(session: Session, *, optimizer: bool) -> Generator[Slice, None, Snapshot]:
    """Copies masters (and moments, with `optimizer`) to the CPU. The session must not change meanwhile.

    All ranks run the slices, in the same order; each gets the whole copy.
    """
    saved = SavedSession(
        rank=session.settings.rank,
        alpha=session.settings.alpha,
        step=session.step,
        calls=session.num_calls,
        modules=[module.name for module in session.modules],
        has_optimizer=optimizer,
    )
    adapter = yield from copied_masters(session)
    state = yield from _copied(session.optimizer.tensors() if optimizer else {}, session.parts, suffix=True)
    return Snapshot(saved, adapter, state)


def copied_bytes(session: Session, *, optimizer: bool) -> int:
    """Bytes that `snapshot` copies."""
    moments = [*session.optimizer.first.items(), *session.optimizer.second.items()] if optimizer else []
    shapes = [session.parts.whole_shape(name, own) for name, own in (*session.parameters.items(), *moments)]
    return 4 * sum(math.prod(shape) for shape in shapes)


def taken_masters(session: Session) -> tuple[AdapterTensors, Contents]:
    """As `copied_masters`, and what is known of the copy (`MasterCopies.take`), on another thread than the engine's.

    The session must not change meanwhile. Not with several ranks, which exchange their parts on the engine's thread.
    """
    copies, contents = session.copies.take()
    return _masters(session, copies), contents


def copied_masters(session: Session) -> Generator[Slice, None, AdapterTensors]:
    """A copy of the session's masters as an adapter, whole. All ranks run the slices, in the same order."""
    return _masters(session, (yield from _copied(session.parameters, session.parts)))


def _masters(session: Session, copied: Mapping[str, torch.Tensor]) -> AdapterTensors:
    pairs = {
        module.name: (copied[f"{module.name}.lora_A"], copied[f"{module.name}.lora_B"]) for module in session.modules
    }
    return AdapterTensors.from_modules(session.settings.rank, session.settings.alpha, pairs)


def check_target(path: Path, *, replace: bool) -> None:
    """Raises ConflictError if `write` would raise it, before the session is copied."""
    with errors_of_path(path, "written"):
        if not os.path.lexists(path):
            return
        if not replace:
            raise ConflictError(f"{path} exists already; choose another path, or save with replace")
        if path.is_dir() and not path.is_symlink():
            _may_replace(path, path)
        else:
            raise ConflictError(f"{path} is not a directory, so it is not replaced by one; choose another path")


def _may_replace(directory: Path, shown: Path) -> None:
    _SAVED_FILES(directory, shown)
    if (directory / SESSION_FILE).exists():
        try:
            _read_saved(directory)
        except AdapterError as error:
            raise ConflictError(f"{shown}: not replaced: {error}; choose another path") from None


def write(path: Path, snapshot: Snapshot, family: Family, host: Host, *, replace: bool) -> str:
    """Writes the directory and returns the adapter's content hash.

    Raises ConflictError if `path` exists (with `replace`: if `save` did not write it), and InvalidValueError for a path
    that can't be written.
    """
    extra = {SESSION_FILE: msgspec.json.encode(snapshot.saved)}
    if snapshot.saved.has_optimizer:
        extra[OPTIMIZER_FILE] = safetensors.torch.save(snapshot.optimizer)
    with errors_of_path(path, "written"):
        write_peft_directory(
            path,
            snapshot.adapter,
            family,
            host.config,
            max_rank=host.max_lora_rank,
            base_model=host.model,
            extra=extra,
            replace=_may_replace if replace else None,
        )
    return content_hash(complete_groups(snapshot.adapter, family, host.config))


@dataclass(frozen=True)
class Saved:
    """The checked content of a checkpoint for a session: values of masters and moments, counters."""

    masters: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    step: int
    num_calls: int


def read(path: Path, session: Session, family: Family, host: Host) -> Saved:
    """Reads `path` for `session` into new memory. A directory without `session.json` provides only masters.

    Raises NotFoundError, AdapterError and ConflictError.
    """
    with errors_of_path(path, "read"):
        adapter = read_peft_directory(path, family, host.config, host.max_lora_rank)
        masters = masters_from(adapter, session, session.parts, host.device, str(path))
        saved, moments = _read_session(path, session)
    missing = [module.name for module in session.modules if f"{module.name}.lora_A" not in masters]
    if missing:
        raise ConflictError(f"{path}: has no tensors for {missing[0]!r}, which session {session.name!r} trains")
    moments = {
        name: _own_moment(name, value, session.parts).to(
            "cpu" if name.endswith(".steps") else host.device, torch.float32, copy=True
        )
        for name, value in moments.items()
    }
    return Saved(masters, moments, *((saved.step, saved.calls) if saved else (0, 0)))


def restore(session: Session, saved: Saved) -> Slices:
    """Sets masters, moments and counters from `saved`, and clears the gradient."""
    yield from session.restore(saved.masters, saved.moments, saved.step, saved.num_calls)


class Trained(Protocol):
    """The properties of a session that are known before it is open."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> LoraSettings: ...
    @property
    def modules(self) -> Sequence[LoraModule]: ...


def masters_from(
    adapter: AdapterTensors, session: Trained, parts: AdapterParts, device: torch.device, where: str
) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors, as values of the session's masters: of this rank's parts.

    A scaling that differs from the session's is folded into B. Raises ConflictError if the ranks differ or the adapter
    adapts a module that the session does not train.
    """
    settings = session.settings
    if adapter.rank != settings.rank:
        raise ConflictError(f"{where}: rank {adapter.rank}; session {session.name!r} has rank {settings.rank}")
    trained = {module.name for module in session.modules}
    factor = adapter.scaling / (settings.alpha / settings.rank)
    tensors: dict[str, torch.Tensor] = {}
    for name, pair in adapter.modules.items():
        if name in trained:
            scaled = pair.scaled(factor)
            for own, whole in ((f"{name}.lora_A", scaled.a), (f"{name}.lora_B", scaled.b)):
                tensors[own] = parts.own(own, whole).to(device, torch.float32, copy=True)
        elif pair.a.any() or pair.b.any():  # an all-zero pair only completes a fused group
            raise ConflictError(f"{where}: adapts {name!r}, which session {session.name!r} does not train")
    return tensors


def _read_session(path: Path, session: Session) -> tuple[SavedSession | None, dict[str, torch.Tensor]]:
    saved = _read_saved(path)
    if saved is None:
        return None, {}
    with open_directory(path) as directory:
        if not saved.has_optimizer:
            return saved, {}
        masters_bytes = 4 * num_parameters(session.modules, session.settings.rank)
        largest = 2 * masters_bytes + MAX_SESSION_BYTES * 64
        state = read_tensors(directory.read(OPTIMIZER_FILE, largest), str(path / OPTIMIZER_FILE))
    _check_optimizer(state, session, path / OPTIMIZER_FILE)
    return saved, state


def _read_saved(path: Path) -> SavedSession | None:
    with open_directory(path) as directory:
        if SESSION_FILE not in directory.file_names():
            return None
        where = path / SESSION_FILE
        try:
            saved = msgspec.json.decode(bytes(directory.read(SESSION_FILE, MAX_SESSION_BYTES)), type=SavedSession)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise AdapterError(f"{where}: {error}") from None
    if saved.format != 1:
        raise AdapterError(f"{where}: format {saved.format}; this version reads format 1")
    return saved


def _check_optimizer(state: dict[str, torch.Tensor], session: Session, where: Path) -> None:
    expected: dict[str, Any] = {}
    for name, parameter in session.parameters.items():
        shape = session.parts.whole_shape(name, parameter)
        expected |= {f"{name}.first": shape, f"{name}.second": shape, f"{name}.steps": ()}
    for name, tensor in state.items():
        if name not in expected:
            raise AdapterError(f"{where}: unknown key {name!r}; session {session.name!r} does not train it")
        if tuple(tensor.shape) != tuple(expected[name]) or tensor.dtype != torch.float32:
            raise AdapterError(
                f"{where}: {name!r} is {tensor.dtype} {list(tensor.shape)}; expected float32 {list(expected[name])}"
            )
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{where}: {name!r} contains NaN or Inf")
        if name.endswith(".second") and (tensor < 0).any():
            raise AdapterError(f"{where}: {name!r} contains a negative mean of squares")
        if name.endswith(".steps") and not 1 <= float(tensor) <= MAX_ADAM_STEPS:
            raise AdapterError(f"{where}: {name!r} is {float(tensor):g}; expected 1 to {MAX_ADAM_STEPS:g} steps")
        kinds = [f"{name.rpartition('.')[0]}.{kind}" for kind in ("first", "second", "steps")]
        missing = [kind for kind in kinds if kind not in state]
        if missing:
            raise AdapterError(f"{where}: {missing[0]!r} is missing")


def _copied(
    tensors: Mapping[str, torch.Tensor], parts: AdapterParts, *, suffix: bool = False
) -> Generator[Slice, None, dict[str, torch.Tensor]]:
    """Copies tensors to the CPU, whole. `suffix`: names are those of moments: a parameter's, ".", and the kind."""
    copied: dict[str, torch.Tensor] = {}
    for upcoming, names in portions("copy", tensors):
        yield upcoming
        for name in names:
            own = tensors[name].detach()
            whole = _whole_moment(name, own, parts) if suffix else parts.whole(name, own)
            copied[name] = whole.to("cpu", torch.float32, copy=whole is own)
    return copied


def _whole_moment(name: str, own: torch.Tensor, parts: AdapterParts) -> torch.Tensor:
    parameter, _, kind = name.rpartition(".")
    return own if kind == "steps" else parts.whole(parameter, own)


def _own_moment(name: str, whole: torch.Tensor, parts: AdapterParts) -> torch.Tensor:
    parameter, _, kind = name.rpartition(".")
    return whole if kind == "steps" else parts.own(parameter, whole)
