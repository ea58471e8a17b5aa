"""The frontend's process while SGLang starts its others."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.sglang_patch.frontend import http_server
from kt_runtime.sglang_patch.hooks import Hooks


def report(model: Path, pipe: Any) -> None:
    """Applies the frontend's patches, prepares the process as SGLang does, and sends the name of SIGQUIT's handler."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import prepare_server_args

    hooks = Hooks(on_cpu=True)
    http_server.install(hooks)
    hooks.apply()
    arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu"])
    arguments.resolve_once()
    engine._set_envs_and_config(arguments)
    handler: Any = signal.getsignal(signal.SIGQUIT)
    pipe.send(handler.__name__)


@pytest.mark.slow
def test_a_process_that_dies_while_the_model_is_loaded_is_told_from_its_start_on(tmp_path: Path) -> None:
    make_model(load_preset("tiny-qwen3-moe"), tmp_path / "model", seed=0)
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=report, args=(tmp_path / "model", there))
    process.start()
    assert here.poll(120)
    assert here.recv() == http_server._engine_died_while_loading.__name__
    process.join(60)
    assert process.exitcode == 0
