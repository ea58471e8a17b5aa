"""Stock SGLang as a peer: the same package, started as its users start it, without kt-runtime's plugins.

SGLang 0.5.23 loads every installed entry point of two groups, unless SGLANG_PLUGINS lists the names to load. An empty
list means all, so a name that nothing has stands for none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kt_runtime.bench.serve.server_side import ServerSide
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import free_port, other_server

GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")
OURS = "kt_runtime"  # the name of both entry points, in pyproject.toml
NO_PLUGIN = "no-plugin"
# The options of ServerSide that SGLang has under another name. All others that it lacks are kt-runtime's own.
RENAMED = {"--context-tokens": "--context-length"}
SAME = ("--dtype", "--max-total-tokens", "--max-running-requests")


def stock_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` in which SGLang loads every plugin that is installed but ours."""
    names = sorted({entry.name for group in GROUPS for entry in entry_points(group=group)} - {OURS})
    kept = {name: value for name, value in environment.items() if name != "SGLANG_PLATFORM"}
    return {**kept, "SGLANG_PLUGINS": ",".join(names) or NO_PLUGIN, "PYTHONSAFEPATH": "1"}


def stock_arguments(options: list[str]) -> list[str]:
    """SGLang's arguments for `options`, pairs of a name and a value of `kt-runtime serve`. LoRA's and adapters' are
    left out: stock SGLang serves the base alone, and its memory is the smaller for it."""
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    names = {**{name: name for name in SAME}, **RENAMED}
    return [text for name, value in pairs.items() if name in names for text in (names[name], value)]


class StockSide(ServerSide):
    """Measures SGLang's own server. `extra` of ServerSide: further options of SGLang."""

    def _started(self, model: Path, directory: Path) -> AbstractContextManager[ServerAPI]:
        port = free_port()
        place = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-P", "-m", "sglang.launch_server", *place]
        command += [*stock_arguments(self._serving_options()), *self._extra]
        return other_server(command, port, stock_environment(os.environ), directory / "server.log")

    def _status(self, api: ServerAPI) -> Mapping[str, Any]:
        return {}
