"""Peers that compute the server's cases: Hugging Face in this interpreter, llama.cpp in another one.

A peer runs in a process of its own, whose end frees all memory. A peer that fails leaves the cases that it has
measured, and the reason. Another server is a peer, too: `no_step.NoStep`.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kt_runtime.bench.experts.kt_kernel import plain_environment
from kt_runtime.bench.peer_place import ON_CPU, PeerPlace
from kt_runtime.bench.serve.plan import PREFILL, Case
from kt_runtime.bench.serve.rows import Measured
from kt_runtime.bench.serve.server_side import Measurements
from kt_runtime.cli.interrupts import uninterrupted

SCRIPT = Path(__file__).with_name("peer_script.py")
TIMEOUT_S = 2 * 3600.0
SHOWN_CHARACTERS = 600  # of an error
HUGGING_FACE, LLAMA_CPP = "hugging_face", "llama_cpp"


class Peer:
    """`engine`: its name in the result. `facts`: versions and settings. `problem`: why cases lack a result; None: none
    does."""

    def __init__(self, engine: str, say: Callable[[str], None]) -> None:
        self.engine = engine
        self.facts: dict[str, Any] = {}
        self.problem: str | None = None
        self.measured: dict[Case, Measured] = {}
        self._say = say

    def say(self, line: str) -> None:
        self._say(f"{self.engine}: {line}")

    def fail(self, problem: str) -> None:
        self.problem = problem
        self.say(problem)

    def as_json(self) -> dict[str, Any]:
        return self.facts | {"problem": self.problem}


class ScriptPeer(Peer):
    """One of `peer_script.ENGINES`, run by the interpreter `python`. `scores`: log-probabilities of the scored prompts;
    empty: unknown."""

    def __init__(self, engine: str, python: Path, say: Callable[[str], None]) -> None:
        super().__init__(engine, say)
        self.scores: list[list[float]] = []
        self._python = python.absolute()  # not resolved: the link's location identifies a virtual environment

    def measure(
        self,
        model: Path,
        server: Measurements,
        dtype: str,
        threads: int,
        directory: Path,
        place: PeerPlace = ON_CPU,
        scored: Sequence[list[int]] = (),
    ) -> None:
        """Runs the cases of `server` that have no adapters, and scores the prompts `scored`. `model`: the checkpoint's
        directory, or the GGUF file. `directory`: for the question and the log."""
        cases = [case for case in server if not case.adapters]
        question = {
            "engine": self.engine,
            "model": str(model),
            "dtype": dtype,
            "threads": threads,
            "device": place.device,
            "device_layers": place.layers,
            "scored": list(scored),
            "cases": [
                {"kind": case.kind, "prompts": server[case][1].prompts, "answers": server[case][1].answers}
                for case in cases
            ],
        }
        path, log = directory / f"{self.engine}.json", directory / f"{self.engine}.log"
        path.write_text(json.dumps(question))
        self.say("loading")
        try:
            with log.open("wb") as opened:
                status = self._run(path, opened, cases)
        except OSError as error:
            self.fail(f"{self._python} does not start: {error}")
            return
        if status != 0 or len(self.measured) < len(cases):
            last = (log.read_text(errors="replace").strip() or "no message").splitlines()[-1]
            ending = f"signal {-status}" if status < 0 else f"status {status}"
            self.fail(f"ended with {ending} after {len(self.measured)} of {len(cases)} cases: {last[:300]}")

    def _run(self, question: Path, log: Any, cases: list[Case]) -> int:
        """The process's exit status. On every way out the process has ended."""
        with uninterrupted() as acting, self._start(question, log) as process:
            timer = threading.Timer(TIMEOUT_S, process.kill)
            try:
                timer.start()
                with acting():
                    assert process.stdout is not None
                    for line in process.stdout:
                        self._take(line, cases)
                    return process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.wait()

    def _start(self, question: Path, log: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self._python), str(SCRIPT), str(question)],
            env=plain_environment() | {"PYTHONSAFEPATH": "1"},  # the script's folder would hide other modules
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in a terminal ends this process, which then ends the peer
        )

    def _take(self, line: str, cases: list[Case]) -> None:
        try:
            found = json.loads(line)
        except ValueError:  # printed by a library
            return
        if not isinstance(found, dict) or not found.keys() & {"facts", "scores", "case"}:
            return
        if "facts" in found:
            self.facts = found["facts"]
            return
        if "scores" in found:
            self.scores = found["scores"]
            return
        case = cases[found["case"]]
        measured = Measured(list(_rates(case, found)), found["experts"], found["same_tokens"])
        self.measured[case] = measured
        self.say(f"{case}: {measured.tokens_per_s:.1f} tokens/s")


def _rates(case: Case, found: dict[str, Any]) -> Iterator[float]:
    for seconds in found["seconds"]:
        tokens = case.size if case.kind == PREFILL else case.size * found["steps"]
        yield tokens / seconds


def one_line(error: Exception) -> str:
    """The message's first line and, of a server that does not start, the last one of its log."""
    lines = str(error).splitlines() or [type(error).__name__]
    return " ".join(dict.fromkeys([lines[0], lines[-1]]))[:SHOWN_CHARACTERS]
