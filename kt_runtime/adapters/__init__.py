"""Adapters: their tensors, PEFT directories, the one validator, versions in memory and on disk.

Attributes are imported on first use, so that checking names and paths does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kt_runtime.adapters.gguf_lora import not_applied, read_gguf_adapter, write_gguf_adapter
    from kt_runtime.adapters.paths import OpenDirectory, check_adapter_name, confined, open_directory
    from kt_runtime.adapters.peft_directory import read_peft_directory, write_peft_directory
    from kt_runtime.adapters.programs import Reader, readers
    from kt_runtime.adapters.safetensors_file import read_tensors, write_tensors
    from kt_runtime.adapters.source import check_is_adapter, read_adapter
    from kt_runtime.adapters.tensors import AdapterTensors, LoraPair, complete_groups, without_fillers
    from kt_runtime.adapters.validator import check_adapter
    from kt_runtime.adapters.version_store import StoredName, VersionStore
    from kt_runtime.adapters.versions import AdapterVersion, VersionTable, as_version, content_hash

_MODULE_OF = {
    "AdapterTensors": "tensors",
    "AdapterVersion": "versions",
    "LoraPair": "tensors",
    "OpenDirectory": "paths",
    "Reader": "programs",
    "StoredName": "version_store",
    "VersionStore": "version_store",
    "VersionTable": "versions",
    "as_version": "versions",
    "check_adapter": "validator",
    "check_adapter_name": "paths",
    "check_is_adapter": "source",
    "complete_groups": "tensors",
    "confined": "paths",
    "content_hash": "versions",
    "not_applied": "gguf_lora",
    "open_directory": "paths",
    "read_adapter": "source",
    "read_gguf_adapter": "gguf_lora",
    "read_peft_directory": "peft_directory",
    "read_tensors": "safetensors_file",
    "readers": "programs",
    "without_fillers": "tensors",
    "write_gguf_adapter": "gguf_lora",
    "write_peft_directory": "peft_directory",
    "write_tensors": "safetensors_file",
}

__all__ = [
    "AdapterTensors",
    "AdapterVersion",
    "LoraPair",
    "OpenDirectory",
    "Reader",
    "StoredName",
    "VersionStore",
    "VersionTable",
    "as_version",
    "check_adapter",
    "check_adapter_name",
    "check_is_adapter",
    "complete_groups",
    "confined",
    "content_hash",
    "not_applied",
    "open_directory",
    "read_adapter",
    "read_gguf_adapter",
    "read_peft_directory",
    "read_tensors",
    "readers",
    "without_fillers",
    "write_gguf_adapter",
    "write_peft_directory",
    "write_tensors",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
