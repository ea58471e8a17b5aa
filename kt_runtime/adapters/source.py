"""Wherever an adapter comes from: a PEFT directory, or a GGUF file by its name's ending."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_runtime.adapters.gguf_lora import SUFFIX, read_gguf_adapter
from kt_runtime.adapters.peft_directory import read_peft_directory
from kt_runtime.adapters.tensors import AdapterTensors
from kt_runtime.families import Family


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
