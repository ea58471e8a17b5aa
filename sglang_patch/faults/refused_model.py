"""A model that can't be loaded because of what its files hold ends the server with the reason, as a user's error.

Symbol (SGLang 0.5.23): `model_executor.model_runner.ModelRunner.load_model`. Reason: SGLang logs a traceback and sends
a signal to the parent process, which then knows only that a process has died. So the scheduler's process writes the
error's text to a file next to its socket, which the frontend's process reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kt_runtime.errors import CheckpointError, UserError
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.wire.address import ipc_path

SYMBOLS = ("sglang.srt.model_executor.model_runner.ModelRunner.load_model",)


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], _told)


def _told(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except UserError as error:
        settings = ResidentSettings.from_environment()
        if settings is not None:
            _place(settings.wire_address).write_text(str(error), encoding="utf-8")
        raise


def forget(wire_address: str) -> None:
    """Removes what an earlier server may have left."""
    _place(wire_address).unlink(missing_ok=True)


def refusal(wire_address: str) -> CheckpointError | None:
    """Why the model was refused while it was loaded, once; None: it was not."""
    place = _place(wire_address)
    try:
        reason = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    place.unlink(missing_ok=True)
    return CheckpointError(reason)


def _place(wire_address: str) -> Path:
    return ipc_path(wire_address).with_suffix(".refused")
