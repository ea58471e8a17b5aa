"""An adapter from any source: a PEFT directory, or a GGUF file, told apart by the name's ending."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_runtime.adapters.gguf_lora import read_gguf_adapter
from kt_runtime.adapters.peft_directory import read_peft_directory
from kt_runtime.adapters.tensors import AdapterTensors
from kt_runtime.errors import NotFoundError
from kt_runtime.families import Family
from kt_runtime.gguf_file import SUFFIX


def check_is_adapter(path: Path) -> None:
    """Raises NotFoundError where there is neither a directory nor a file NAME.gguf. Nothing is ever downloaded."""
    if not path.is_dir() and not (path.suffix.lower() == SUFFIX and path.is_file()):
        raise NotFoundError(
            f"adapter path {str(path)!r}: no such directory or .gguf file on the server's machine; adapters are not "
            "downloaded from a hub"
        )


def read_adapter(
    path: str | os.PathLike[str],
    family: Family,
    config: Mapping[str, Any],
    max_rank: int,
    base_model: str | None = None,
) -> AdapterTensors:
    """As `read_peft_directory` for a directory, as `read_gguf_adapter` for a file NAME.gguf."""
    if Path(path).suffix.lower() == SUFFIX and not Path(path).is_dir():
        return read_gguf_adapter(path, family, config, max_rank)
    return read_peft_directory(path, family, config, max_rank, base_model)
