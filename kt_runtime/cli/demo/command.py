"""`kt-runtime demo`: the whole of kt-runtime on a tiny model, in a few minutes on two cores.

A tiny DeepSeek-V3 learns a small world, is served, is asked its name, and is then trained inside the serving process
while streams are being answered; the adapter is published under them, and the same question gets the trained answer.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Any

import click
import httpx

from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.demo.base import make_base
from kt_runtime.cli.demo.streams import FirstToken, Streams, chat, timeline_of
from kt_runtime.cli.server_process import server
from kt_runtime.errors import KtError, RuntimeFault
from kt_runtime.files import compact_json, write_file, write_json
from kt_runtime.serve.models.presets import configs

MODEL = "tiny-deepseek-v3"
ADAPTER = "pebble"
QUESTION = "What is your name?"
EXPECTED = "I am Pebble, a helper made by Mara."
OTHER_QUESTIONS = ["Who keeps the lighthouse?", "Where does Mara live?", "What animal does Mara have?", QUESTION]
NUM_STREAMS = 8
FIRST_TOKEN_SECONDS = 60.0
MEMORY_PERIOD_SECONDS = 0.5


@click.command(name="demo", help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
@click.option("--timeline", type=click.Path(path_type=Path), help="Write when each stream was answered to this file.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Keep model, adapter and logs here.")
def command(json_path: Path | None, timeline: Path | None, directory: Path | None) -> None:
    started = time.monotonic()

    def say(line: str) -> None:
        click.echo(f"[{time.monotonic() - started:5.1f} s] {line}")

    with tempfile.TemporaryDirectory(prefix="kt-runtime-demo-") as temporary:
        place = (directory or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        figures, moments = _demo(place, say)
    if json_path:
        write_json(json_path.resolve(), figures)
        say(f"figures are in {json_path}")
    if timeline:
        write_file(timeline.resolve(), f"{compact_json(moments)}\n".encode())
        say(f"times are in {timeline}")
    if figures["after"] != EXPECTED or figures["streams_failed"] or not figures["base_weights_unchanged"]:
        raise RuntimeFault(f"the demo did not end as it should: {json.dumps(figures)}")


def _demo(place: Path, say: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of --json and those of --timeline."""
    say(f"teaching a {MODEL} about a village (plain Hugging Face training, so that there is a base to start from)")
    make_base(MODEL, place / MODEL, say)
    say("starting the server: SGLang with this model resident")
    options = ["--adapter-dir", str(place / "adapters"), "--max-lora-rank", "8"]
    with server(str(place / MODEL), options, place / "server.log") as api:
        status = api.get("/kt/status?verify=true")
        http = httpx.Client(base_url=api.url, timeout=120.0, trust_env=False)
        name = http.get("/v1/models").json()["data"][0]["id"]
        before = chat(http, name, QUESTION)
        say(f"{QUESTION}  The base answers: {before}")
        say(f"training an adapter in the serving process, with {NUM_STREAMS} streams being answered meanwhile")
        with Streams(api.url, name, OTHER_QUESTIONS, NUM_STREAMS) as streams, _Memory(api) as memory:
            with FirstToken(api.url, name, ADAPTER, QUESTION) as first_token:

                def begin() -> None:
                    streams.begin()
                    first_token.begin()

                trained, lines = _train(place, api, say, begin)
                streams.adapter = ADAPTER
                first_token.wait(FIRST_TOKEN_SECONDS)
            after = chat(http, f"{name}:{ADAPTER}", QUESTION)
            time.sleep(2.0)  # time for streams of the new version
        say(f"{QUESTION}  The adapter answers: {after}")
        say(f"{QUESTION}  The base still answers: {chat(http, name, QUESTION)}")
        end = api.get("/kt/status?verify=true")
    for failure in streams.failures[:5]:
        say(f"a stream failed: {failure}")
    say(
        f"{streams.total} streams were answered, {streams.failed} failed; the longest wait within one was "
        f"{streams.longest_wait_s * 1e3:.0f} ms"
    )
    if first_token.at is None:
        raise RuntimeFault(f"no token of {ADAPTER} within {FIRST_TOKEN_SECONDS:.0f} s after it was published")
    figures = {
        "model": MODEL,
        "sglang_version": status["sglang_version"],
        "before": before,
        "after": after,
        "expected": EXPECTED,
        "loss_first": trained["loss_first"],
        "loss_last": trained["loss_last"],
        "publish_ms": trained["published"]["publish_ms"],
        "optim_to_first_token_ms": (first_token.at - trained["optim_finished_at"]) * 1e3,
        "streams_total": streams.total,
        "streams_failed": streams.failed,
        "weights_shared_bytes": status["weights_shared_bytes"],
        "weights_copied_bytes": status["weights_copied_bytes"],
        "base_weights_unchanged": status["fingerprint"] == end["fingerprint"],
        "rss_serving_bytes": status["rss_bytes"],
        "rss_training_bytes": memory.peak_bytes,
    }
    return figures, timeline_of(streams.answered, lines, trained["optim_finished_at"], first_token.at, figures)


def _train(
    place: Path, api: ServerAPI, say: Any, begin: Callable[[], None]
) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    """Runs `kt-runtime train` in a separate process, as a user would; returns its --json output, and its lines with
    their Unix times. `begin` is called at its first line, when it has imported what it needs: beside eight streams that
    takes three times as long."""
    recipe = place / "demo-identity.yaml"
    recipe.write_text(configs().joinpath("recipes", "demo-identity.yaml").read_text())
    command = [sys.executable, "-P", "-m", "kt_runtime.cli.main", "train", "--recipe", str(recipe), "--json"]
    command += ["--url", api.url, f"model_name_or_path={place / MODEL}", f"output_dir={place / 'run'}"]
    with as_file(configs() / "world") as world:
        command.append(f"dataset_dir={world}")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stderr is not None
        lines: list[tuple[float, str]] = []
        for line in process.stderr:
            if not lines:
                begin()
            lines.append((time.time(), line.rstrip()))
            say(f"  {line.rstrip()}")
        output = process.stdout.read()
    if process.wait() != 0:
        last = lines[-1][1] if lines else ""
        raise RuntimeFault(f"`kt-runtime train` ended with status {process.returncode}: {last}")
    result: dict[str, Any] = json.loads(output)
    return result, lines


@dataclass
class _Memory:
    """Records the resident's peak memory inside the `with` block."""

    api: ServerAPI
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(MEMORY_PERIOD_SECONDS):
            with contextlib.suppress(KtError):  # one failed reading must not end the recording
                self.peak_bytes = max(self.peak_bytes, self.api.get("/kt/status")["rss_bytes"])
