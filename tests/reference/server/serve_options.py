"""Options of a server whose sockets and adapters are in one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kt_runtime.serve.options.named import ServeOptions


def options(model: Path, port: int, directory: Path, **values: Any) -> ServeOptions:
    return ServeOptions(
        model=str(model), port=port, runtime_dir=directory, adapter_dir=directory / "adapters", **values
    )
