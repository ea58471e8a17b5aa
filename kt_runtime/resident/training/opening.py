"""The slow part of opening a training session: reads its adapters and draws initial values.

`read_start` runs on a worker thread (`workers.py`) and has no side effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kt_runtime.adapters import AdapterTensors, LoraPair, read_adapter, without_fillers
from kt_runtime.families import Family, LoraModule
from kt_runtime.files import errors_of_path
from kt_runtime.resident.host import Host
from kt_runtime.resident.training.checkpoint import masters_from
from kt_runtime.resident.training.session_limits import FROZEN_BYTES, TRAINED_BYTES, num_parameters
from kt_runtime.resident.twin.adapter_parts import AdapterParts
from kt_runtime.resident.twin.lora import initial_values
from kt_runtime.wire.messages import LoraSettings
from kt_runtime.wire.status import SessionInfo


@dataclass(frozen=True)
class Opening:
    """A session that is being opened. Its memory already counts (`session_limits`); no request can use it yet.

    `key`: the key of its adapter in `LoraModules`. `frozen_bytes`: size of its reference, 0 until that was read.
    """

    name: str
    key: str
    settings: LoraSettings
    modules: list[LoraModule]
    frozen_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return TRAINED_BYTES * num_parameters(self.modules, self.settings.rank) + self.frozen_bytes

    def info(self) -> SessionInfo:
        return SessionInfo(
            session=self.name,
            rank=self.settings.rank,
            alpha=self.settings.alpha,
            step=0,
            modules=[module.name for module in self.modules],
            num_parameters=num_parameters(self.modules, self.settings.rank),
            num_bytes=self.num_bytes,
        )


@dataclass(frozen=True)
class Start:
    """`masters`: parameter name -> value. These and `reference`'s tensors are float32 copies on the device, of several
    ranks the parts of this one."""

    masters: Mapping[str, torch.Tensor]
    reference: AdapterTensors | None

    @property
    def frozen_bytes(self) -> int:
        if self.reference is None:
            return 0
        return FROZEN_BYTES * sum(pair.a.numel() + pair.b.numel() for pair in self.reference.modules.values())


def read_start(opening: Opening, start_from: Path | None, reference: Path | None, family: Family, host: Host) -> Start:
    """The initial masters, from `start_from` where it has them, else drawn at random; and the reference adapter.

    Raises NotFoundError, AdapterError and ConflictError.
    """
    parts = AdapterParts(family.lora_modules(host.config), host.exchange)
    masters: dict[str, torch.Tensor] = {}
    if start_from is not None:
        masters = masters_from(_read(start_from, family, host), opening, parts, host.device, str(start_from))
    frozen = None if reference is None else _frozen(_read(reference, family, host), parts, host.device)
    for module in opening.modules:
        if f"{module.name}.lora_A" not in masters:
            drawn = initial_values(module, opening.settings.rank, opening.settings.seed)
            for name, whole in zip((f"{module.name}.lora_A", f"{module.name}.lora_B"), drawn, strict=True):
                masters[name] = (parts.own(name, whole).clone() if parts.is_split(name) else whole).to(host.device)
    return Start(masters, frozen)


def _read(path: Path, family: Family, host: Host) -> AdapterTensors:
    with errors_of_path(path, "read"):
        return without_fillers(read_adapter(path, family, host.config, host.max_lora_rank))


def _frozen(adapter: AdapterTensors, parts: AdapterParts, device: torch.device) -> AdapterTensors:
    """A float32 copy on the device, which does not keep the file's bytes alive."""

    def copied(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return parts.own(name, tensor).to(device, torch.float32, copy=True)

    return replace(
        adapter,
        modules={
            name: LoraPair(copied(f"{name}.lora_A", pair.a), copied(f"{name}.lora_B", pair.b))
            for name, pair in adapter.modules.items()
        },
    )
