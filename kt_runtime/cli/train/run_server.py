"""The server for a command: the running one, or one started for the command with the recipe's model."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_runtime.cli.connection import ServerAPI, server_url
from kt_runtime.cli.server_process import server
from kt_runtime.errors import ConflictError, KtError, NotFoundError, ServerUnreachableError
from kt_runtime.files import open_regular, read_at, read_regular

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe

LEAST_LORA_RANK = 16  # low, since memory grows with the rank and a run states the rank that it needs
ROUTES_SIZE = "256MiB"
CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES, COMPARED_BYTES = 100_000_000, 1 << 16


@contextlib.contextmanager
def running_server(
    model: str,
    url: str | None,
    api_key: str | None,
    say: Callable[[str], None],
    *,
    max_lora_rank: int = 0,
    placement: Path | None = None,
    keeps_routes: bool = False,
) -> Iterator[ServerAPI]:
    """The running server, or one that is started with `model` and ended with the context.

    `url`: the value of --url, or None. Raises ServerUnreachableError if `url` is given and no server answers there.
    `max_lora_rank`, `placement`: for a server started here, the highest rank to accept and the rule file.
    `keeps_routes`: it keeps routes, for `routing_replay`.
    """
    api = ServerAPI(server_url(url), api_key)
    if api.answers():
        yield api
        return
    check_named_server(url, model)
    local_directory(model)  # reports a missing model before the server starts
    log = Path(tempfile.mkdtemp(prefix="kt-runtime-")) / "server.log"
    say(f"no server at {api.url}: starting one for this run with {model}; its log is {log}")
    arguments = ["--max-lora-rank", str(max(LEAST_LORA_RANK, max_lora_rank))]
    if placement is not None:
        say(f"its placement is that of {placement}")
        arguments += ["--placement", str(placement.resolve())]
    if keeps_routes:
        arguments += ["--routing-replay", ROUTES_SIZE]
    with server(model, arguments, log, api_key=api_key) as started:
        yield started


def check_named_server(url: str | None, model: str) -> None:
    """Call if no server answers. Raises ServerUnreachableError if the user gave `url` explicitly."""
    if url is not None:
        raise ServerUnreachableError(
            f"--url {url}: no server answers there; without --url, one is started with {model} for this command"
        )


def recipes_model(recipe: Recipe, status: Mapping[str, Any] | None) -> Path:
    """The directory of the recipe's model. `status`: of the running server, which must have the model resident; None:
    a server will be started with it. Raises NotFoundError or ConflictError, with the recipe's line.
    """
    where = f"{recipe.where('model_name_or_path')}: model_name_or_path"
    if status is not None:
        return check_model(recipe.model_name_or_path, status, where)
    try:
        return local_directory(recipe.model_name_or_path)
    except NotFoundError as error:
        raise NotFoundError(f"{where}: {error}") from None


def local_directory(model: str) -> Path:
    """The directory on this machine that `model` (a preset, a directory, a hub cache entry) names."""
    from kt_runtime.serve.models.report import resolve_model

    return Path(resolve_model(model).directory)


def check_model(wanted: str, status: Mapping[str, Any], where: str = "model_name_or_path") -> Path:
    """The model's directory on this machine. Raises ConflictError when `wanted` is not the resident model.

    `status`: the fields "model" and "model_directory" of GET /kt/status. Two directories hold the same model when their
    paths are the same, or their configuration and list of weights.
    """
    resident, directory = str(status["model"]), Path(status["model_directory"])
    found: Path | None = None
    with contextlib.suppress(KtError):
        found = local_directory(wanted)
    if wanted in (resident, str(directory)) or (found and same_checkpoint(found, directory)):
        return directory if directory.is_dir() else found or directory
    raise ConflictError(
        f"{where}: {wanted}: the server's resident model is {resident} ({directory}); name that one, or end that "
        "server, and one is started with this model"
    )


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether both are one directory, or have equal configurations, weight indexes and beginnings of weights."""
    if one.resolve() == other.resolve():
        return True
    try:
        return _identity(one) == _identity(other)
    except (OSError, ValueError):
        return False


def _identity(directory: Path) -> tuple[Any, bytes, list[tuple[int, bytes]]]:
    """(configuration, index, beginnings of the first and last weight file). A fine-tuned checkpoint differs from its
    base in the weights only."""
    config = json.loads(read_regular(directory / CONFIG_FILE, MAX_HEADER_BYTES))
    index = read_regular(directory / INDEX_FILE, MAX_HEADER_BYTES) if (directory / INDEX_FILE).is_file() else b""
    files = sorted(set(json.loads(index)["weight_map"].values())) if index else [WEIGHTS_FILE]
    return config, index, [_beginning(directory / files[0]), _beginning(directory / files[-1])]


def _beginning(path: Path) -> tuple[int, bytes]:
    """Size, header and first weights of a safetensors file."""
    with open_regular(path) as descriptor:
        header_bytes = int.from_bytes(read_at(descriptor, 8, 0), "little")
        compared_bytes = 8 + min(header_bytes, MAX_HEADER_BYTES) + COMPARED_BYTES
        return os.fstat(descriptor).st_size, read_at(descriptor, compared_bytes, 0)
